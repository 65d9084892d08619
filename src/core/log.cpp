#include "core/log.hpp"

#include <spdlog/logger.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <atomic>
#include <ostream>

namespace layerstream {
namespace {

spdlog::level::level_enum native(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

struct Log::State {
  State(spdlog::sink_ptr sink, LogLevel level) : logger("layerstream", std::move(sink)) {
    logger.set_pattern("%Y-%m-%d %H:%M:%S.%e %^%-7l%$ %v");
    logger.set_level(native(level));
    logger.flush_on(spdlog::level::debug);
  }

  spdlog::logger logger;
  std::atomic<Clock::rep> last_line{Clock::now().time_since_epoch().count()};
};

Log::Log(LogLevel level)
    : state_(std::make_shared<State>(std::make_shared<spdlog::sinks::stderr_color_sink_mt>(), level)) {}

Log::Log(std::ostream& stream, LogLevel level)
    : state_(std::make_shared<State>(std::make_shared<spdlog::sinks::ostream_sink_mt>(stream), level)) {}

bool Log::enabled(LogLevel level) const {
  return state_->logger.should_log(native(level));
}

void Log::write(LogLevel level, std::string_view line) const {
  if (!enabled(level)) return;
  state_->logger.log(native(level), spdlog::string_view_t(line.data(), line.size()));
  state_->last_line = Clock::now().time_since_epoch().count();
}

Log::Clock::time_point Log::last_line() const {
  return Clock::time_point(Clock::duration(state_->last_line.load()));
}

}  // namespace layerstream
