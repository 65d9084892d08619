#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string_view>
#include <utility>

namespace layerstream {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

/// Lines with time and level, from any thread, each flushed at once. Copies write to the same place.
class Log {
 public:
  using Clock = std::chrono::steady_clock;

  /// To standard error.
  explicit Log(LogLevel level = LogLevel::info);
  /// To `stream`, which must outlive the log.
  explicit Log(std::ostream& stream, LogLevel level = LogLevel::info);

  template <class... Args>
  void debug(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::debug)) write(LogLevel::debug, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::info)) write(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void warning(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::warning))
      write(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::error, fmt::format(format, std::forward<Args>(args)...));
  }

  bool enabled(LogLevel level) const;
  void write(LogLevel level, std::string_view line) const;

  /// When the last line was written; before the first, when the log was made.
  Clock::time_point last_line() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace layerstream
