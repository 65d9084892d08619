// Whole training steps on random tokens: tokens per second, model FLOP/s, how busy each lane was and what the
// compute lane waited for, memory against the plan. One engine runs several step sizes, largest buffers first
// made:
//
//   train_step --model examples/qwen2.5-7b-shape/config.json --tokens 1024
//              --step-tokens 8192 --step-tokens 65536 --steps 3

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <utility>

#include "backends/make_device.hpp"
#include "backends/peak_rates.hpp"
#include "core/config.hpp"
#include "core/process_memory.hpp"
#include "core/random.hpp"
#include "engine/engine.hpp"
#include "engine/operation_times.hpp"
#include "engine/planner.hpp"
#include "engine/step_report.hpp"
#include "engine/trace.hpp"
#include "model/hf_config.hpp"
#include "ops/runtime.hpp"

namespace layerstream {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Options {
  std::string model;
  std::int64_t tokens = 1024;
  std::vector<std::int64_t> step_tokens;
  std::int64_t rows = 8;
  int steps = 5;
  int warmup = 2;
  bool no_clip = false;
  bool no_times = false;
  bool state_hash = false;
  std::string trace;
  std::vector<std::string> settings;  ///< configuration keys, key=value
  std::vector<std::string> others;    ///< those without an option of their own
};

/// Options that stand for a configuration key, so that they take what the key takes.
void add_setting(CLI::App& app, Options& options, const std::string& name, const std::string& key) {
  app.add_option_function<std::string>(
      name,
      [&options, key](const std::string& value) {
        options.settings.push_back(fmt::format("{}={}", key, value));
      },
      "configuration key " + key);
}

RunConfig config_of(const Options& options) {
  std::vector<std::string> settings = options.settings;
  settings.push_back("config_name='" + options.model + "'");
  settings.push_back(fmt::format("cutoff_len={}", options.tokens));
  settings.push_back(
      fmt::format("per_device_train_batch_size={}", std::ranges::max(options.step_tokens) / options.tokens));
  if (options.no_clip) settings.emplace_back("max_grad_norm=0");
  const LoadedConfig loaded = parse_config("", "train_step", settings);
  check_config(loaded);
  return loaded.run;
}

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

/// Weights whose values do not matter, in seconds instead of the tens of seconds that normal numbers take:
/// uniform, with the standard deviation that the model wants. Moments of a fresh store are zero.
void fill_weights(ParameterStore& store, double standard_deviation, WorkerPool& pool) {
  constexpr std::int64_t piece = std::int64_t{1} << 20;
  const float half_width = static_cast<float>(std::sqrt(3.0) * standard_deviation);
  std::uint64_t stream = 0;
  for (int block = 0; block < store.layout().num_blocks(); ++block) {
    const Slab& slab = store.slab(block);
    for (const Parameter& parameter : store.layout().blocks[static_cast<std::size_t>(block)].parameters) {
      const bool is_bias = parameter.name.ends_with(".bias");
      ++stream;
      pool.parallel_for((parameter.numel() + piece - 1) / piece, [&](std::int64_t index) {
        std::uint64_t state = philox(stream, static_cast<std::uint64_t>(index), 0)[0] | 1U;
        const std::int64_t begin = parameter.offset + index * piece;
        const std::int64_t end = std::min(begin + piece, parameter.offset + parameter.numel());
        for (std::int64_t i = begin; i < end; ++i) {
          state ^= state << 13U;  // xorshift64 (Marsaglia, "Xorshift RNGs", 2003)
          state ^= state >> 7U;
          state ^= state << 17U;
          const float uniform = static_cast<float>(static_cast<std::int32_t>(state >> 32U)) * 0x1.0p-31F;
          const SplitFloat halves =
              split(parameter.is_matrix ? half_width * uniform : (is_bias ? 0.0F : 1.0F));
          slab.hi[i] = halves.hi;
          slab.lo[i] = halves.lo;
        }
      });
    }
    store.bump_version(block);
  }
}

/// A number of all weights and moments, in their order: equal for equal bits.
std::uint64_t hash_of(const ParameterStore& store, WorkerPool& pool) {
  constexpr std::int64_t piece = std::int64_t{1} << 20;
  std::uint64_t hash = 0;
  const auto mix = [](std::uint64_t into, std::uint64_t word) {
    const auto words = philox(into, word, 0);
    return std::uint64_t{words[0]} << 32U | words[1];
  };
  const auto add = [&]<class T>(const T* values, std::int64_t n) {
    std::vector<std::uint64_t> hashes(static_cast<std::size_t>((n + piece - 1) / piece), 0);
    pool.parallel_for(static_cast<std::int64_t>(hashes.size()), [&](std::int64_t index) {
      std::uint64_t& own = hashes[static_cast<std::size_t>(index)];
      const std::int64_t end = std::min(n, (index + 1) * piece);
      for (std::int64_t i = index * piece; i < end; ++i) {
        // FNV-1a (Fowler, Noll, Vo) over values instead of bytes.
        std::uint32_t bits = 0;
        std::memcpy(&bits, values + i, sizeof(T));
        own = (own ^ bits) * 0x100000001b3ULL + 1;
      }
    });
    for (const std::uint64_t own : hashes) hash = mix(hash, own);
  };
  for (int block = 0; block < store.layout().num_blocks(); ++block) {
    const Slab& slab = store.slab(block);
    add(slab.hi, slab.num_elements);
    add(slab.lo, slab.num_elements);
    add(slab.exp_avg, slab.num_elements);
    add(slab.exp_avg_sq, slab.num_elements);
  }
  return hash;
}

/// Part of the update that is the device's.
double device_share(const EngineShape& shape) {
  std::int64_t elements = 0;
  for (int block = 0; block < shape.layout.num_blocks(); ++block)
    elements += shape.schedule.device_update.of(block);
  return static_cast<double>(elements) / static_cast<double>(shape.layout.num_parameters());
}

/// A trained engine's steps of one size.
class Bench {
 public:
  /// @param profile for predictions; may be null
  Bench(const Options& options, const RunConfig& config, const ModelSpec& spec, Device& device,
        const HardwareProfile* profile)
      : options_(options),
        config_(config),
        device_(device),
        profile_(profile),
        times_(device),
        engine_(spec, config, EngineMode::train, device,
                {.poison = false, .observer = options.no_times ? nullptr : &times_}),
        rows_(random_rows(std::ranges::max(options.step_tokens) / options.tokens, options.tokens,
                          spec.vocab_size)) {
    rates_ = engine_.measure_rates();
    times_.set_enabled(true);
    const auto start = Clock::now();
    fill_weights(engine_.parameters(), spec.initializer_range, engine_.pool());
    std::cout << fmt::format("weights filled in {:.1f} s\n", seconds_since(start)) << std::flush;
  }

  const Engine& engine() const { return engine_; }
  /// Of the state after all steps so far.
  std::uint64_t state_hash() {
    engine_.apply_pending();
    return hash_of(std::as_const(engine_).parameters(), engine_.pool());
  }
  const MeasuredRates& rates() const { return rates_; }

  void run(std::int64_t step_tokens) {
    const std::span<const TokenRow> rows =
        std::span(rows_).first(static_cast<std::size_t>(step_tokens / options_.tokens));
    std::vector<double> seconds;
    std::vector<StepReport> reports;
    double loss = 0.0;
    for (int step = 0; step < options_.warmup + options_.steps; ++step) {
      const bool measured = step >= options_.warmup;
      const auto start = Clock::now();
      const StepResult result = engine_.train_step(
          rows,
          {.adamw = {.learning_rate = 1e-5, .step = ++steps_done_}, .max_grad_norm = config_.max_grad_norm});
      const double took = seconds_since(start);
      loss = result.loss;
      if (!measured) continue;
      seconds.push_back(took);
      if (!options_.no_times) reports.push_back(make_step_report(engine_.schedule(), times_.read()));
    }
    print(step_tokens, seconds, loss);
    if (!reports.empty()) std::cout << mean_of(reports).to_table() << std::flush;
    if (!options_.trace.empty()) {
      std::filesystem::path path = options_.trace;
      if (options_.step_tokens.size() > 1)
        path.replace_filename(
            fmt::format("{}-{}{}", path.stem().string(), step_tokens, path.extension().string()));
      write_trace(path, engine_.schedule(), times_.read());
    }
  }

 private:
  void print(std::int64_t step_tokens, std::vector<double> seconds, double loss) const {
    std::ranges::sort(seconds);
    const double median = seconds[seconds.size() / 2];
    const auto rate = [&](double s) { return static_cast<double>(step_tokens) / s; };
    const double flops = model_flops(engine_.schedule());
    double done = 0.0;
    for (const Operation& operation : engine_.schedule().operations) done += operation.flops;
    const std::optional<double> peak = peak_flops(device_.description(), config_.compute_dtype);
    std::cout << fmt::format(
        "\n{} tokens a step: {:.0f} tokens/s median ({:.0f} to {:.0f}), {:.3f} s, {:.3g} model TFLOP/s, "
        "{:.3g} with recomputation{}, loss {:.9g}\n",
        step_tokens, rate(median), rate(seconds.back()), rate(seconds.front()), median,
        1e-12 * flops / median, 1e-12 * done / median,
        peak ? fmt::format(", MFU {:.1f}% of {:.0f}", 100.0 * flops / median / *peak, 1e-12 * *peak) : "",
        loss);
    if (profile_ == nullptr) return;
    const ChunkPlan chunks = uniform_chunk_plan(step_tokens / options_.tokens, options_.tokens,
                                                engine_.shape().bounds.chunk_tokens);
    const StepPrediction prediction = predict_step(*profile_, engine_.shape(), chunks,
                                                   planned_block_costs(engine_.shape(), engine_.backend()));
    std::cout << fmt::format("predicted {:.3f} s, measured {:.3f} s ({:+.1f}%); bottleneck: {}\n",
                             prediction.run.seconds, median, 100.0 * (median / prediction.run.seconds - 1.0),
                             find_bottleneck(prediction).what);
  }

  const Options& options_;
  const RunConfig& config_;
  Device& device_;
  const HardwareProfile* profile_;
  OperationTimes times_;
  Engine engine_;
  std::vector<TokenRow> rows_;
  MeasuredRates rates_;
  std::int64_t steps_done_ = 0;
};

void run(Options options) {
  options.settings.insert(options.settings.end(), options.others.begin(), options.others.end());
  if (options.step_tokens.empty()) options.step_tokens = {options.rows * options.tokens};
  for (const std::int64_t tokens : options.step_tokens) {
    if (tokens < options.tokens || tokens % options.tokens != 0) {
      throw ConfigError(
          fmt::format("--step-tokens {}: not a multiple of --tokens {}", tokens, options.tokens));
    }
  }
  RunConfig config = config_of(options);
  const ModelSpec spec = load_hf_config(options.model);
  const ops::Runtime runtime;
  for (const std::string& warning : runtime.warnings()) std::cerr << warning << '\n';
  const std::unique_ptr<Device> device = make_device(config.device_memory_limit, host_budget(config).bytes);
  const std::size_t used_at_start = device->used_bytes();
  const HostBudget host = host_budget(config);
  const std::optional<HardwareProfile> profile = profile_of_run(config, *device);
  if (profile) {
    const auto begin = Clock::now();
    const Plan placed =
        plan_placement(spec, config, {.profile = *profile, .device = *device, .host = host}, 0);
    std::cout << fmt::format("planned in {:.1f} s, {} placements simulated with the rates of {}\n{}{}",
                             seconds_since(begin), placed.num_candidates, profile->name,
                             placed.placement_yaml(), placed.summary());
    config = placed.config;
  }
  const Ledger plan = plan_run(spec, config, *device, 0).ledger;

  const auto start = Clock::now();
  Bench bench(options, config, spec, *device, profile ? &*profile : nullptr);
  const Engine& engine = bench.engine();
  std::cout << fmt::format("{} on {}\n", runtime.description(), device->description());
  std::cout << fmt::format(
      "{} parameters, rows of {} tokens, {}, chunks of {}, {} slots, device share {:.2f}; ready in {:.1f} s\n",
      engine.shape().layout.num_parameters(), options.tokens, name_of(config.compute_dtype),
      engine.shape().bounds.chunk_tokens, engine.shape().schedule.weight_slots, device_share(engine.shape()),
      seconds_since(start));
  const MeasuredRates rates = bench.rates();
  std::cout << fmt::format(
      "measured: {:.1f} GB/s to the device, {:.1f} GB/s to the host, host memory {:.1f} GB/s\n",
      1e-9 * rates.to_device, 1e-9 * rates.to_host, 1e-9 * rates.host_memory);
  std::cout << fmt::format("settings: {}\n", fmt::join(options.settings, " ")) << std::flush;

  for (const std::int64_t tokens : options.step_tokens) bench.run(tokens);
  if (options.state_hash) std::cout << fmt::format("state hash {:016x}\n", bench.state_hash());

  const auto against = [](std::size_t measured, std::size_t planned) {
    return fmt::format("{} of {} planned ({:+.1f}%)", format_bytes(measured), format_bytes(planned),
                       100.0 * (static_cast<double>(measured) / static_cast<double>(planned) - 1.0));
  };
  const std::size_t host_plan =
      plan.total(Space::host) + (device->uses_host_memory() ? plan.total(Space::device) : 0);
  std::cout << fmt::format("\ndevice: {} in use ({} when the device was opened)\n",
                           against(device->used_bytes(), plan.total(Space::device)),
                           format_bytes(used_at_start));
  std::cout << fmt::format("host:   peak {}\n", against(ProcessMemory::now().peak, host_plan));
}

int main_of(int argc, char** argv) {
  CLI::App app("Training steps on random tokens");
  Options options;
  app.add_option("--model", options.model, "config.json of a Hugging Face model")->required();
  app.add_option("--tokens", options.tokens, "tokens of a row")->check(CLI::PositiveNumber);
  app.add_option("--rows", options.rows, "rows of a step, where --step-tokens is not given")
      ->check(CLI::PositiveNumber);
  app.add_option("--step-tokens", options.step_tokens, "tokens of a step; several: one after the other");
  app.add_option("--steps", options.steps, "measured steps of each size")->check(CLI::PositiveNumber);
  app.add_option("--warmup", options.warmup, "steps before them")->check(CLI::NonNegativeNumber);
  app.add_flag("--no-clip", options.no_clip, "no clipping, as optimizer_update: immediate needs");
  app.add_flag("--state-hash", options.state_hash,
               "print a hash of all weights and moments at the end: equal wherever they were placed");
  CLI::Option* const no_times = app.add_flag("--no-times", options.no_times, "do not time operations");
  app.add_option("--trace", options.trace, "timeline of each size's last step, for ui.perfetto.dev")
      ->excludes(no_times);
  for (const auto& [name, key] :
       std::vector<std::pair<std::string, std::string>>{{"--dtype", "compute_dtype"},
                                                        {"--policy", "activation_policy"},
                                                        {"--device-activations", "device_activation_blocks"},
                                                        {"--gradient-home", "gradient_home"},
                                                        {"--device-share", "optimizer_device_share"},
                                                        {"--slots", "weight_slots"},
                                                        {"--chunk", "chunk_tokens"},
                                                        {"--loss-tile", "loss_tile_tokens"},
                                                        {"--threads", "optimizer_threads"},
                                                        {"--device-memory-limit", "device_memory_limit"},
                                                        {"--host-memory-limit", "host_memory_limit"}}) {
    add_setting(app, options, name, key);
  }
  app.add_option("--set", options.others, "key=value: any other configuration key")->allow_extra_args(false);
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return error.code();
  }
  return exit_code::success;
}

}  // namespace
}  // namespace layerstream

int main(int argc, char** argv) {
  return layerstream::main_of(argc, argv);
}
