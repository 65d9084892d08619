#pragma once

#include <optional>
#include <string>

#include "engine/planner.hpp"

namespace layerstream {

/// The longest row that a machine can train, one row a step.
struct LongestRow {
  std::int64_t tokens = 0;   ///< a multiple of longest_row_unit; 0: not even one unit fits
  std::optional<Plan> plan;  ///< of a step of it
  std::string limit;         ///< what is short, and by how much, for one unit more
};
inline constexpr std::int64_t longest_row_unit = 1024;

/// Its tokens alone, in a moment.
std::int64_t longest_row_tokens(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                                std::size_t data_bytes);

/// cutoff_len, per_device_train_batch_size and gradient_accumulation_steps of the configuration do not count.
/// Longest rows of 2^27 tokens are looked for. Throws as plan_placement does, but for memory.
LongestRow find_longest_row(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                            std::size_t data_bytes);

}  // namespace layerstream
