#include "engine/longest_row.hpp"

#include "core/error.hpp"

namespace layerstream {
namespace {

constexpr std::int64_t most_units = (std::int64_t{1} << 27) / longest_row_unit;

RunConfig run_of_one_row(const RunConfig& config, std::int64_t tokens) {
  RunConfig run = config;
  run.cutoff_len = tokens;
  run.per_device_train_batch_size = 1;
  run.gradient_accumulation_steps = 1;
  return run;
}

}  // namespace

std::int64_t longest_row_tokens(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                                std::size_t data_bytes) {
  const auto fits = [&](std::int64_t units) {
    return can_be_placed(spec, run_of_one_row(config, units * longest_row_unit), machine, data_bytes);
  };
  std::int64_t fitting = 0;
  std::int64_t failing = 1;
  while (failing <= most_units && fits(failing)) {
    fitting = failing;
    failing *= 2;
  }
  while (failing <= most_units && failing - fitting > 1) {
    const std::int64_t middle = fitting + (failing - fitting) / 2;
    (fits(middle) ? fitting : failing) = middle;
  }
  return fitting * longest_row_unit;
}

LongestRow find_longest_row(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                            std::size_t data_bytes) {
  LongestRow longest{
      .tokens = longest_row_tokens(spec, config, machine, data_bytes), .plan = {}, .limit = {}};
  if (longest.tokens > 0) {
    longest.plan = plan_placement(spec, run_of_one_row(config, longest.tokens), machine, data_bytes);
  }
  if (longest.tokens >= most_units * longest_row_unit) {
    longest.limit = "nothing: rows of more tokens were not looked at";
    return longest;
  }
  try {
    (void)plan_placement(spec, run_of_one_row(config, longest.tokens + longest_row_unit), machine,
                         data_bytes);
    longest.limit = "memory, within the grain of placements that are looked at";
  } catch (const ResourceError& error) {
    // The lines before the ledger.
    const std::string message = error.what();
    longest.limit = message.substr(0, message.find("\n  "));
  }
  return longest;
}

}  // namespace layerstream
