// Tokens per second of whole training steps, and how busy each lane was. One table; run it on an idle
// machine:  train_step CONFIG_JSON [ROWS TOKENS STEPS fp32|bf16 POLICY]

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <mutex>

#include "backends/simulated_device.hpp"
#include "core/process_memory.hpp"
#include "core/random.hpp"
#include "engine/engine.hpp"
#include "model/hf_config.hpp"
#include "ops/runtime.hpp"

namespace layerstream {
namespace {

using Clock = std::chrono::steady_clock;

/// Time that each lane spends inside its operations.
class LaneTimes final : public ExecutionObserver {
 public:
  void before(int, const Operation& operation) override { start_[index(operation)] = Clock::now(); }
  void after(int, const Operation& operation) override {
    busy_[index(operation)] += std::chrono::duration<double>(Clock::now() - start_[index(operation)]).count();
  }
  double busy(Lane lane) const { return busy_[static_cast<std::size_t>(lane)]; }
  void clear() { busy_ = {}; }

 private:
  static std::size_t index(const Operation& operation) { return static_cast<std::size_t>(operation.lane); }
  // A lane's entries are touched by that lane's thread alone while a step runs.
  std::array<Clock::time_point, all_lanes.size()> start_{};
  std::array<double, all_lanes.size()> busy_{};
};

std::vector<TokenRow> random_rows(std::int64_t rows, std::int64_t tokens, std::int64_t vocab_size) {
  std::vector<TokenRow> made(static_cast<std::size_t>(rows));
  std::uint64_t index = 0;
  for (TokenRow& row : made) {
    row.document_starts = {0};
    for (std::int64_t t = 0; t < tokens; ++t) {
      row.input_ids.push_back(
          static_cast<std::int32_t>(uniform_at(1, 1, index++) * static_cast<double>(vocab_size)));
    }
    row.targets.assign(row.input_ids.begin() + 1, row.input_ids.end());
    row.targets.push_back(-100);
  }
  return made;
}

int run(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: train_step CONFIG_JSON [ROWS TOKENS STEPS fp32|bf16 input|attention|all]\n";
    return exit_code::refused;
  }
  const auto number = [&](int i, std::int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  const auto word = [&](int i, std::string otherwise) { return argc > i ? std::string(argv[i]) : otherwise; };
  const ModelSpec spec = load_hf_config(argv[1]);
  RunConfig config;
  config.per_device_train_batch_size = number(2, 4);
  config.cutoff_len = number(3, 256);
  const std::int64_t steps = number(4, 10);
  config.compute_dtype = word(5, "fp32") == "bf16" ? DType::bf16 : DType::f32;
  const std::string policy = word(6, "input");
  config.activation_policy = policy == "all"         ? ActivationPolicy::all
                             : policy == "attention" ? ActivationPolicy::input_attention
                                                     : ActivationPolicy::input;

  const ops::Runtime runtime;
  for (const std::string& warning : runtime.warnings()) std::cerr << warning << '\n';
  SimulatedDevice device(host_budget(config).bytes);
  LaneTimes lanes;
  Engine engine(spec, config, EngineMode::train, device, {.poison = false, .observer = &lanes});
  engine.parameters().initialize(1, spec.initializer_range, engine.pool());
  const auto rows = random_rows(config.per_device_train_batch_size, config.cutoff_len, spec.vocab_size);

  std::vector<double> seconds;
  for (std::int64_t step = 0; step < steps + 2; ++step) {
    if (step == 2) {  // the first steps warm up caches and thread pools
      seconds.clear();
      lanes.clear();
    }
    const auto start = Clock::now();
    (void)engine.train_step(rows, {.adamw = {.learning_rate = 1e-3, .step = step + 1}, .max_grad_norm = 1.0});
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  double total = 0.0;
  for (const double s : seconds) total += s;
  std::sort(seconds.begin(), seconds.end());
  const double tokens = static_cast<double>(config.per_device_train_batch_size * config.cutoff_len);
  const double parameters = static_cast<double>(engine.shape().layout.num_parameters());
  const double median = seconds[seconds.size() / 2];
  std::cout << fmt::format("{} parameters, {} x {} tokens, {}, activations {}, {}\n", parameters,
                           config.per_device_train_batch_size, config.cutoff_len,
                           name_of(config.compute_dtype), policy, runtime.description());
  std::cout << fmt::format("tokens/s {:.0f} (median), model GFLOP/s {:.1f} (6N per token)\n", tokens / median,
                           6.0 * parameters * tokens / median * 1e-9);
  for (const Lane lane : all_lanes) {
    std::cout << fmt::format("lane {:<8} busy {:5.1f}%\n", name_of(lane), 100.0 * lanes.busy(lane) / total);
  }
  std::cout << fmt::format("peak memory {}\n", format_bytes(ProcessMemory::now().peak));
  return exit_code::success;
}

}  // namespace
}  // namespace layerstream

int main(int argc, char** argv) {
  return layerstream::run(argc, argv);
}
