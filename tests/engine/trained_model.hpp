#pragma once

#include <cmath>
#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine_fixture.hpp"

namespace layerstream::test {

template <class Function>
void for_each_parameter(const ModelLayout& layout, const Function& function) {
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      function(block, parameter);
    }
  }
}

inline std::vector<float> values_of(const ParameterStore& store, int block, const Parameter& parameter) {
  std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
  store.read(block, parameter, 0, values);
  return values;
}

/// Who updates, and when.
struct UpdateMode {
  std::string name;
  std::function<void(RunConfig&)> turn;
};

inline void PrintTo(const UpdateMode& mode, std::ostream* stream) {
  *stream << mode.name;
}

inline std::vector<UpdateMode> update_modes() {
  return {{"deferred", [](RunConfig& run) { run.optimizer_device_share = 0.0; }},
          {"immediate", [](RunConfig& run) { run.optimizer_update = OptimizerUpdate::immediate; }},
          {"deferred_by_both", [](RunConfig& run) { run.optimizer_device_share = 0.5; }},
          {"deferred_with_resident_blocks",
           [](RunConfig& run) {
             run.resident_blocks = 3;
             run.optimizer_device_share = 0.5;
           }},
          {"deferred_by_the_device", [](RunConfig& run) {
             run.optimizer_device_share = 1.0;
             run.gradients_on_host = false;
           }}};
}

/// An engine with weights from a fixed seed, on a device of its own.
class TrainedModel {
 public:
  TrainedModel(const ModelSpec& spec, const RunConfig& run, std::size_t device_bytes = std::size_t{1} << 30)
      : device_(make_test_device(device_bytes)),
        engine(spec, run, EngineMode::train, *device_, {.poison = true}) {
    engine.parameters().initialize(11, spec.initializer_range, engine.pool());
  }

  const ModelLayout& layout() { return engine.parameters().layout(); }

  /// Of the last step, all parameters in order.
  std::vector<std::vector<float>> gradients() {
    std::vector<std::vector<float>> all;
    for_each_parameter(layout(), [&](int block, const Parameter& parameter) {
      all.push_back(engine.gradient(block, parameter));
    });
    return all;
  }

  void fill(int block, std::string_view tail, float value) {
    const Parameter& parameter = layout().blocks[static_cast<std::size_t>(block)].at(tail);
    engine.parameters().write(block, parameter, 0,
                              std::vector<float>(static_cast<std::size_t>(parameter.numel()), value));
    engine.parameters().bump_version(block);
  }

  void scale(int block, std::string_view tail, float factor) {
    const Parameter& parameter = layout().blocks[static_cast<std::size_t>(block)].at(tail);
    std::vector<float> values = values_of(engine.parameters(), block, parameter);
    for (float& value : values) value *= factor;
    engine.parameters().write(block, parameter, 0, values);
    engine.parameters().bump_version(block);
  }

 private:
  std::unique_ptr<Device> device_;

 public:
  Engine engine;
};

/// ‖a − b‖ / ‖b‖.
inline double relative_error(const std::vector<float>& a, const std::vector<double>& b) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace layerstream::test
