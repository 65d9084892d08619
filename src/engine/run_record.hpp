#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "backends/device.hpp"
#include "backends/measure_rates.hpp"
#include "core/config.hpp"
#include "engine/engine.hpp"

namespace layerstream {

/// A step of full rows as the rates of a profile predict it.
struct PlannedStep {
  std::string profile;
  double seconds = 0.0;
  double tokens_per_second = 0.0;
};

/// "bf16 compute, fp32 master, moments and gradients".
std::string numbers_text(const EngineShape& shape);

/// "AdamW on AVX2 with 8 threads".
std::string optimizer_text(const RunConfig& run);

/// What a run is, for `layerstream report` and `compare`: run.json in its output directory.
struct RunRecord {
  const LoadedConfig& config;     ///< as given
  const RunConfig& placed;        ///< with every placement key
  const std::string& model_path;  ///< of the model's config.json
  const ModelSpec& spec;
  const Engine& engine;
  const Device& device;
  const MeasuredRates& rates;
  const std::optional<PlannedStep>& planned;
  std::int64_t total_steps = 0;
  std::int64_t first_step = 0;  ///< done before this process
  std::int64_t rows_per_step = 0;
  std::int64_t num_rows = 0;  ///< of an epoch

  /// A JSON object with the program's version, host, model, device, backend, memory ledger, the peaks of
  /// memory so far, the planned step, and every key of the configuration with its value and where that came
  /// from: a place, "default", or "chosen" by the planner or with the checkpoint.
  std::string to_json() const;
};

}  // namespace layerstream
