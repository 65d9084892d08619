#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream {

/// How a child process ended.
struct ChildExit {
  int code = -1;   ///< −1 if a signal killed it
  int signal = 0;  ///< the one that did
  std::size_t peak_bytes = 0;
};

/// A program that runs beside this one, in a process group of its own (so that what a terminal or a batch
/// system sends to this one does not reach it), with an empty standard input and pipes for the rest.
class ChildProcess {
 public:
  enum class Stream : std::uint8_t { out, err };
  using Sink = std::function<void(Stream, std::string_view bytes)>;

  /// @param command the program, looked up in PATH unless it has a slash, and its arguments; no shell is
  /// involved. Throws std::system_error if it cannot be started.
  explicit ChildProcess(std::vector<std::string> command);
  /// Kills it, with all of its group, if it still runs.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// Waits up to `patience` for something to read and gives it to `sink`. False once both streams are closed.
  bool read_some(std::chrono::milliseconds patience, const Sink& sink);

  /// To the group. Nothing if the child is known to have ended.
  void signal(int number) noexcept;
  /// Whether anything of the group is left, the child or what it started.
  bool has_group() const noexcept;
  /// Ends what is left of it.
  void kill_group() noexcept;

  /// How it ended, if it has.
  std::optional<ChildExit> try_wait() noexcept;
  /// Waits for its end, which a child that waits for its output to be read does not reach.
  ChildExit wait() noexcept;

 private:
  void close_stream(std::size_t stream) noexcept;
  void note_end(int status, std::size_t peak_bytes) noexcept;

  pid_t pid_ = -1;
  std::array<int, 2> pipes_{-1, -1};  ///< to read from; −1 once closed
  std::optional<ChildExit> end_;
};

/// A command as a line for a shell.
std::string shell_line(const std::vector<std::string>& command);

/// What run_child calls.
struct ChildCallbacks {
  std::function<void(ChildProcess::Stream, std::string_view line)> line = {};  ///< without its end
  std::function<void()> poll = {};  ///< at least five times a second; may throw to stop the child
  /// From SIGTERM, when a callback throws, to SIGKILL.
  std::chrono::milliseconds grace{5'000};
};

/// Runs a command to its end; what it writes is cut into lines. Throws std::system_error if it cannot be
/// started, and what the callbacks throw, once the child has ended.
ChildExit run_child(std::vector<std::string> command, const ChildCallbacks& callbacks);

}  // namespace layerstream
