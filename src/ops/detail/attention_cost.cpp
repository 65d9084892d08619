#include "ops/detail/attention_cost.hpp"

#include <bit>
#include <utility>

#include "core/error.hpp"

namespace layerstream::ops::detail {
namespace {

constexpr std::int64_t longest_tile = 16384;

/// Bound on what ragged entries add to any plan.
std::size_t descriptor_bytes(std::int64_t batch) {
  return static_cast<std::size_t>(32768 + 1024 * batch);
}

/// The most that any plan wants for calls within the limits, which tell the longest segment.
std::size_t most_plan_bytes(const AttentionLimits& limits, const AttentionCost& cost) {
  const std::int64_t tile = cost.tile();
  const std::int64_t queries = std::min(tile, attention_bucket(std::min(limits.queries, limits.longest)));
  const auto within = [](std::size_t bytes) { return std::min(bytes, attention_plan_bytes); };
  std::size_t most = cost.forward_bytes(std::max(attention_call_entries, limits.queries / round_extent));
  most = std::max(most,
                  within(cost.backward_bytes(1, queries, std::min(tile, attention_bucket(limits.longest)))));
  if (limits.window > 0) {
    const std::int64_t keys = attention_bucket(std::min(limits.longest, limits.window + tile));
    most = std::max(most, within(cost.backward_bytes(1, queries, keys)));
  }
  for (std::int64_t bucket = shortest_bucket; bucket <= queries; bucket *= 2) {
    // Entries of this bucket are longer than half of it, except in the first.
    const std::int64_t shortest = bucket == shortest_bucket ? 1 : bucket / 2 + 1;
    const std::int64_t ragged = std::min(tiles(limits.queries, shortest), attention_call_entries);
    const auto batch = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(ragged)));
    most = std::max(most, within(cost.backward_bytes(batch, bucket, bucket)));
    // As many uniform entries as fit into the queries, were they all as long as the bucket.
    const std::int64_t uniform = std::max<std::int64_t>(1, limits.queries / std::max(shortest, round_extent));
    most = std::max(most, within(cost.backward_bytes(uniform, bucket, bucket)));
  }
  return most;
}

}  // namespace

std::int64_t attention_bucket(std::int64_t tokens) {
  return std::max(shortest_bucket,
                  static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tokens))));
}

std::size_t AttentionCost::forward_bytes(std::int64_t batch) const {
  return descriptor_bytes(batch);
}

std::size_t AttentionCost::backward_bytes(std::int64_t batch, std::int64_t queries, std::int64_t keys) const {
  const std::int64_t rows = batch * heads * queries;
  // Gradients of scores in bf16, or sums of dq in fp32.
  const std::int64_t sums = deterministic
                                ? 2 * batch * heads * rounded_up(queries, 64) * rounded_up(keys, 128)
                                : 4 * rows * head_dim;
  // dk and dv of every query head in bf16, before they are added up within groups.
  const std::int64_t ungrouped = heads == key_heads ? 0 : 4 * batch * heads * keys * head_dim;
  const std::int64_t deltas = 4 * rows;
  return static_cast<std::size_t>(sums + ungrouped + deltas) + descriptor_bytes(batch);
}

std::int64_t AttentionCost::tile() const {
  std::int64_t tile = longest_tile;
  while (backward_bytes(1, tile, tile) > attention_plan_bytes) {
    if (tile == shortest_bucket) {
      throw ResourceError(fmt::format(
          "attention_backward: {} heads of {} need {} bytes of workspace for {} tokens, the most is {}",
          heads, head_dim, backward_bytes(1, tile, tile), tile, attention_plan_bytes));
    }
    tile /= 2;
  }
  return tile;
}

std::size_t attention_table_bytes(std::int64_t batch) {
  return static_cast<std::size_t>(3 * (batch + 1)) * sizeof(std::int64_t) +
         static_cast<std::size_t>(2 * batch) * sizeof(std::int32_t);
}

AttentionWorkspaceLayout::AttentionWorkspaceLayout(const AttentionLimits& given) {
  AttentionLimits limits = given;
  limits.window = std::min(limits.window, limits.keys);
  const std::int64_t most = std::max(limits.queries, limits.keys);
  limits.longest = limits.longest > 0 ? std::min(limits.longest, most) : most;
  const AttentionCost cost{limits.num_attention_heads, limits.num_key_value_heads, limits.head_dim,
                           limits.deterministic};
  const std::int64_t tile = cost.tile();
  const std::int64_t query_row = limits.num_attention_heads * limits.head_dim;
  const std::int64_t key_row = limits.num_key_value_heads * limits.head_dim;
  const std::int64_t longest = limits.window > 0 ? limits.window + tile : tile;
  const std::int64_t key_rows = std::min(limits.keys, std::max(limits.queries, longest));
  const std::int64_t query_rows = std::min({limits.queries, limits.longest, tile});
  const auto take = [this](std::int64_t size) {
    return std::exchange(bytes, bytes + static_cast<std::size_t>(rounded_up(size, 256)));
  };
  table = take(static_cast<std::int64_t>(attention_table_bytes(attention_call_entries)));
  lse = take(4 * limits.queries * limits.num_attention_heads);
  dk = take(2 * key_rows * key_row);
  dv = take(2 * key_rows * key_row);
  // Of o in forward, where nothing but a run's own length bounds its rows.
  dq = take(2 * (limits.several_ranges ? std::min(limits.queries, limits.longest) : query_rows) * query_row);
  dq_sum = take(4 * query_rows * query_row);
  plan_bytes = most_plan_bytes(limits, cost);
  plan = take(static_cast<std::int64_t>(plan_bytes));
}

}  // namespace layerstream::ops::detail
