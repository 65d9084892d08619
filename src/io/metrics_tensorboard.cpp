#include "io/metrics_tensorboard.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>

#include "core/host_name.hpp"
#include "io/tensorboard_events.hpp"

namespace layerstream::io {
namespace {

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// With a time after those of the files that are there, as readers go through files by their names: a run may
/// go on in the second in which it began.
std::filesystem::path next_name(const std::filesystem::path& directory) {
  constexpr std::string_view prefix = "events.out.tfevents.";
  auto seconds = static_cast<std::int64_t>(seconds_since_1970());
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    std::int64_t other = 0;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), other);
    seconds = std::max(seconds, other + 1);
  }
  return directory / fmt::format("{}{}.{}.{}", prefix, seconds, host_name(), ::getpid());
}

/// As rewrite_logs of transformers/integrations/integration_utils.py.
std::string tag_of(std::string_view name) {
  constexpr std::string_view of_evaluation = "eval_";
  if (name.starts_with(of_evaluation)) return fmt::format("eval/{}", name.substr(of_evaluation.size()));
  return fmt::format("train/{}", name);
}

struct Number {
  std::optional<float> operator()(std::int64_t value) const { return static_cast<float>(value); }
  std::optional<float> operator()(double value) const { return static_cast<float>(value); }
  std::optional<float> operator()(bool) const { return {}; }
  std::optional<float> operator()(const std::string&) const { return {}; }
};

}  // namespace

TensorBoardMetrics::TensorBoardMetrics(const std::filesystem::path& directory, std::int64_t resumed_step,
                                       std::shared_ptr<FileSystem> files) {
  create_directories(*files, directory);
  file_ = std::make_unique<AppendFile>(next_name(directory), 0, std::move(files));
  const double now = seconds_since_1970();
  file_->append(tf_record(version_event(now)) + tf_record(restart_event(now, resumed_step + 1)));
}

void TensorBoardMetrics::write(std::int64_t step, std::initializer_list<Metric> metrics) {
  std::vector<Scalar> scalars;
  for (const auto& [name, value] : metrics) {
    if (const std::optional<float> number = std::visit(Number{}, value)) {
      scalars.emplace_back(tag_of(name), *number);
    }
  }
  if (!scalars.empty()) file_->append(tf_record(scalar_event(seconds_since_1970(), step, scalars)));
}

}  // namespace layerstream::io
