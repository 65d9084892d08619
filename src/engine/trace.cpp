#include "engine/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "core/error.hpp"

namespace layerstream {
namespace {

constexpr int process = 1;

int row_of(Lane lane) {
  return static_cast<int>(lane) + 1;
}

/// A nanosecond inside a slice's end, so that the arrow belongs to it and not to the slice that follows.
constexpr double inside = 1e-3;

class TraceText {
 public:
  explicit TraceText(const Schedule& schedule) : schedule_(schedule) {
    event(R"("ph":"M","name":"process_name","pid":{},"args":{{"name":"layerstream step {}"}})", process,
          schedule.step);
    for (const Lane lane : all_lanes) {
      event(R"("ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{}"}})", process,
            row_of(lane), name_of(lane));
      event(R"("ph":"M","name":"thread_sort_index","pid":{},"tid":{},"args":{{"sort_index":{}}})", process,
            row_of(lane), row_of(lane));
    }
  }

  void slice(const Operation& operation, const OperationTime& time) {
    std::string arguments = fmt::format(R"("step":{})", schedule_.step);
    const auto argument = [&](std::string_view name, auto value, bool present) {
      if (present) fmt::format_to(std::back_inserter(arguments), R"(,"{}":{})", name, value);
    };
    argument("block", operation.block, operation.block >= 0);
    argument("chunk", operation.chunk, operation.chunk >= 0);
    argument("piece", operation.piece, operation.piece >= 0);
    argument("bytes", operation.bytes, operation.bytes > 0);
    argument("flops", operation.flops, operation.flops > 0.0);
    event(R"("ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{{}}})",
          name_of(operation.kind), name_of(operation.lane), process, row_of(operation.lane), 1e6 * time.begin,
          1e6 * std::max(0.0, time.end - time.begin), arguments);
  }

  void arrow(int id, Lane from, double from_microseconds, Lane to, double to_microseconds) {
    event(R"("ph":"s","id":{},"name":"wait","cat":"wait","pid":{},"tid":{},"ts":{:.3f})", id, process,
          row_of(from), from_microseconds);
    event(R"("ph":"f","bp":"e","id":{},"name":"wait","cat":"wait","pid":{},"tid":{},"ts":{:.3f})", id,
          process, row_of(to), to_microseconds);
  }

  std::string finish() {
    text_ += "\n]}\n";
    return std::move(text_);
  }

 private:
  template <class... Arguments>
  void event(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    text_ += first_ ? "\n{" : ",\n{";
    first_ = false;
    fmt::format_to(std::back_inserter(text_), format, std::forward<Arguments>(arguments)...);
    text_ += '}';
  }

  const Schedule& schedule_;
  std::string text_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
  bool first_ = true;
};

}  // namespace

std::string trace_json(const Schedule& schedule, std::span<const OperationTime> times) {
  LAYERSTREAM_EXPECT(times.size() == schedule.operations.size(), "{} times for {} operations", times.size(),
                     schedule.operations.size());
  TraceText text(schedule);
  for (std::size_t i = 0; i < times.size(); ++i) text.slice(schedule.operations[i], times[i]);
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    const auto time_of = [&](int index) -> const OperationTime& {
      return times[static_cast<std::size_t>(index)];
    };
    const auto last =
        std::ranges::max_element(operation.dependencies, {}, [&](int index) { return time_of(index).end; });
    if (last == operation.dependencies.end()) continue;
    const OperationTime& from = time_of(*last);
    text.arrow(static_cast<int>(i), schedule.operations[static_cast<std::size_t>(*last)].lane,
               std::max(1e6 * from.begin, 1e6 * from.end - inside), operation.lane, 1e6 * times[i].begin);
  }
  return text.finish();
}

void write_trace(const std::filesystem::path& path, const Schedule& schedule,
                 std::span<const OperationTime> times) {
  std::ofstream file(path, std::ios::binary);
  file << trace_json(schedule, times);
  file.close();
  if (!file)
    throw FileError(fmt::format("{}: the trace cannot be written: {}", path.string(), std::strerror(errno)));
}

}  // namespace layerstream
