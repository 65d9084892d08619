#include "ops/detail/attention_calls.hpp"

#include <bit>
#include <map>
#include <utility>

#include "core/error.hpp"

namespace layerstream::ops::detail {
namespace {

using Part = AttentionCall::QueryGradient;

/// Chunks of a row that may have a plan of their own each, in forward.
constexpr std::int64_t planned_chunks = 16;

/// Causal, with as many queries as keys.
bool is_square(const AttentionSegment& segment) {
  return segment.causal && segment.num_queries == segment.num_keys;
}

AttentionMask mask_of(const AttentionSegment& segment) {
  if (!segment.causal) return AttentionMask::none;
  return is_square(segment) ? AttentionMask::causal : AttentionMask::bottom_right;
}

bool is_round(std::int64_t extent) {
  return extent % round_extent == 0;
}

/// As attention_bucket, but never more than an eighth too many: the keys under a window, of which there are
/// many for few queries.
std::int64_t fine_bucket(std::int64_t tokens) {
  const std::int64_t step = std::max(shortest_bucket, attention_bucket(tokens) / 16);
  return rounded_up(tokens, step);
}

/// The segment without the keys that no query sees, and without a window that hides nothing.
AttentionSegment trimmed(AttentionSegment segment) {
  const std::int64_t unseen = visible_keys(segment, std::int64_t{0}).begin;
  segment.first_key += unseen;
  segment.num_keys -= unseen;
  if (segment.window >= segment.num_keys) segment.window = 0;
  return segment;
}

/// Whether all are squares of one round extent and one window, each right after the one before it.
bool is_uniform(std::span<const AttentionSegment> segments) {
  const AttentionSegment& first = segments.front();
  if (!is_square(first) || first.num_queries == 0 || !is_round(first.num_queries)) return false;
  for (std::size_t i = 1; i < segments.size(); ++i) {
    const AttentionSegment &before = segments[i - 1], &segment = segments[i];
    if (!is_square(segment) || segment.num_queries != first.num_queries || segment.window != first.window ||
        segment.first_query != before.first_query + before.num_queries ||
        segment.first_key != before.first_key + before.num_keys) {
      return false;
    }
  }
  return true;
}

/// @param most entries of a call
void add_uniform(std::vector<AttentionCall>& calls, std::span<const AttentionSegment> segments,
                 std::int64_t most) {
  const AttentionSegment first = trimmed(segments.front());
  const std::size_t parts = static_cast<std::size_t>(tiles(static_cast<std::int64_t>(segments.size()), most));
  const std::size_t even = (segments.size() + parts - 1) / parts;  // so that most calls share one plan
  while (!segments.empty()) {
    const auto entries = segments.first(std::min(even, segments.size()));
    calls.push_back({.batch = static_cast<std::int64_t>(entries.size()),
                     .queries = first.num_queries,
                     .keys = first.num_keys,
                     .mask = AttentionMask::causal,
                     .window = first.window,
                     .entries = {entries.begin(), entries.end()}});
    segments = segments.subspan(entries.size());
  }
}

/// @pre `entry` is trimmed
AttentionCall single_call(const AttentionSegment& entry, bool may_be_exact) {
  const bool exact = may_be_exact && is_round(entry.num_queries) && is_round(entry.num_keys);
  return {.batch = 1,
          .queries = exact ? entry.num_queries : attention_bucket(entry.num_queries),
          .keys = exact ? entry.num_keys : attention_bucket(entry.num_keys),
          .mask = mask_of(entry),
          .window = entry.window,
          .ragged = !exact,
          .entries = {entry}};
}

AttentionCall forward_call(const AttentionSegment& segment) {
  const AttentionSegment seen = trimmed(segment);
  return single_call(seen, seen.num_keys <= planned_chunks * seen.num_queries);
}

/// Gathers squares of like length into ragged calls.
class RaggedCalls {
 public:
  explicit RaggedCalls(std::vector<AttentionCall>& calls) : calls_(calls) {}

  /// @param most entries of a call
  void add(const AttentionSegment& square, std::int64_t most) {
    const std::int64_t bucket = attention_bucket(square.num_queries);
    const Key key{bucket, trimmed(square).window};
    std::vector<AttentionSegment>& open = open_[key];
    if (!open.empty() &&
        (static_cast<std::int64_t>(open.size()) == most || !continues(open.back(), square))) {
      close(key, open);
    }
    open.push_back(square);
  }

  void finish() {
    for (auto& [key, open] : open_) {
      if (!open.empty()) close(key, open);
    }
  }

 private:
  using Key = std::pair<std::int64_t, std::int64_t>;  // bucket, window

  static bool continues(const AttentionSegment& last, const AttentionSegment& next) {
    return next.first_query >= last.first_query + last.num_queries &&
           next.first_key - next.first_query == last.first_key - last.first_query;
  }

  void close(const Key& key, std::vector<AttentionSegment>& open) {
    const auto count = static_cast<std::uint64_t>(open.size());
    calls_.push_back({.batch = static_cast<std::int64_t>(std::bit_ceil(count)),
                      .queries = key.first,
                      .keys = key.first,
                      .mask = AttentionMask::causal,
                      .window = key.second,
                      .ragged = true,
                      .entries = std::exchange(open, {})});
  }

  std::vector<AttentionCall>& calls_;
  std::map<Key, std::vector<AttentionSegment>> open_;
};

/// The backward pass of one run in tiles.
class TiledBackward {
 public:
  TiledBackward(std::vector<AttentionCall>& calls, std::span<const AttentionSegment> run,
                const AttentionCost& cost)
      : calls_(calls), tile_(cost.tile()), num_queries_(run.front().num_queries) {
    for (const AttentionSegment& range : run) {
      ranges_.push_back(trimmed(range));
      if (ranges_.back().window > 0) tile_ = std::min(tile_, window_tile(ranges_.back(), cost));
    }
  }

  void add() {
    for (std::int64_t begin = 0; begin < num_queries_; begin += tile_) {
      const Interval queries{begin, std::min(begin + tile_, num_queries_)};
      std::vector<AttentionSegment> parts;
      for (const AttentionSegment& range : ranges_) append(parts, range, queries);
      for (std::size_t i = 0; i < parts.size(); ++i) push(parts[i], place(i, parts.size()));
    }
  }

 private:
  static Part place(std::size_t i, std::size_t count) {
    if (count == 1) return Part::whole;
    if (i == 0) return Part::first;
    return i + 1 < count ? Part::next : Part::last;
  }

  /// Those keys of `range` that the block of queries sees, tile by tile.
  void append(std::vector<AttentionSegment>& parts, const AttentionSegment& range, Interval queries) const {
    const AttentionSegment block{.first_query = range.first_query + queries.begin,
                                 .num_queries = queries.size(),
                                 .first_key = range.first_key,
                                 .num_keys = visible_keys(range, queries.end - 1).end,
                                 .causal = range.causal,
                                 .window = range.window};
    if (range.window > 0) {
      parts.push_back(trimmed(block));
    } else if (range.causal) {
      // Bottom-right causal backward computes the masked half as well (measured: half the rate), so the keys
      // before the block of queries make unmasked rectangles and the rest a square.
      const std::int64_t before = block.num_keys - block.num_queries;
      append_rectangles(parts, block, before);
      parts.push_back({block.first_query, block.num_queries, block.first_key + before, block.num_queries});
    } else {
      append_rectangles(parts, block, block.num_keys);
    }
  }

  /// The first `num_keys` keys of `block`, which all its queries see.
  void append_rectangles(std::vector<AttentionSegment>& parts, const AttentionSegment& block,
                         std::int64_t num_keys) const {
    for (std::int64_t key = 0; key < num_keys; key += tile_) {
      parts.push_back({.first_query = block.first_query,
                       .num_queries = block.num_queries,
                       .first_key = block.first_key + key,
                       .num_keys = std::min(tile_, num_keys - key),
                       .causal = false});
    }
  }

  /// @throws ResourceError if the window needs more workspace than a plan may want, however short the tile.
  static std::int64_t window_tile(const AttentionSegment& range, const AttentionCost& cost) {
    std::int64_t tile = cost.tile();
    const auto bytes = [&] {
      const std::int64_t queries = attention_bucket(std::min(tile, range.num_queries));
      return cost.backward_bytes(1, queries, fine_bucket(std::min(range.num_keys, range.window + tile)));
    };
    while (bytes() > attention_plan_bytes) {
      if (tile == shortest_bucket) {
        throw ResourceError(fmt::format(
            "attention_backward: a window of {} keys needs {} bytes of workspace for {} heads of {}, the most "
            "is {}; use fewer keys per row (cutoff_len)",
            range.window, bytes(), cost.heads, cost.head_dim, attention_plan_bytes));
      }
      tile /= 2;
    }
    return tile;
  }

  void push(const AttentionSegment& entry, Part part) {
    AttentionCall call = single_call(entry, true);
    if (call.ragged && entry.window > 0) call.keys = fine_bucket(entry.num_keys);
    call.query_gradient = part;
    calls_.push_back(std::move(call));
  }

  std::vector<AttentionCall>& calls_;
  std::vector<AttentionSegment> ranges_;  // trimmed
  std::int64_t tile_, num_queries_;
};

std::int64_t most_entries(const AttentionCost& cost, std::int64_t extent) {
  const std::size_t one = cost.backward_bytes(1, extent, extent);
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(attention_plan_bytes / one));
}

/// A power of two, so that a batch rounded up to one stays within it.
std::int64_t most_ragged_entries(const AttentionCost& cost, std::int64_t bucket) {
  const auto most = static_cast<std::uint64_t>(most_entries(cost, bucket));
  return std::min(attention_call_entries, static_cast<std::int64_t>(std::bit_floor(most)));
}

}  // namespace

std::vector<AttentionCall> attention_forward_calls(std::span<const AttentionSegment> segments) {
  std::vector<AttentionCall> calls;
  if (segments.empty()) return calls;
  if (is_uniform(segments)) {
    add_uniform(calls, segments, static_cast<std::int64_t>(segments.size()));
    return calls;
  }
  RaggedCalls ragged(calls);
  while (!segments.empty()) {
    const auto run = segments.first(leading_run(segments));
    segments = segments.subspan(run.size());
    if (run.front().num_queries == 0) continue;
    if (run.size() == 1 && is_square(run.front())) {
      ragged.add(run.front(), attention_call_entries);
      continue;
    }
    for (std::size_t i = 0; i < run.size(); ++i) {
      calls.push_back(forward_call(run[i]));
      calls.back().joins = i > 0;
    }
  }
  ragged.finish();
  return calls;
}

std::vector<AttentionCall> attention_backward_calls(std::span<const AttentionSegment> segments,
                                                    const AttentionCost& cost) {
  std::vector<AttentionCall> calls;
  const std::int64_t tile = cost.tile();
  while (!segments.empty()) {
    auto disjoint = segments.first(leading_disjoint(segments));
    segments = segments.subspan(disjoint.size());
    if (is_uniform(disjoint) && disjoint.front().num_queries <= tile) {
      add_uniform(calls, disjoint, most_entries(cost, disjoint.front().num_queries));
      continue;
    }
    RaggedCalls ragged(calls);
    while (!disjoint.empty()) {
      const auto run = disjoint.first(leading_run(disjoint));
      disjoint = disjoint.subspan(run.size());
      const AttentionSegment& segment = run.front();
      if (segment.num_queries == 0) continue;
      if (run.size() == 1 && is_square(segment) && segment.num_queries <= tile) {
        ragged.add(segment, most_ragged_entries(cost, attention_bucket(segment.num_queries)));
      } else {
        TiledBackward(calls, run, cost).add();
      }
    }
    ragged.finish();
  }
  return calls;
}

}  // namespace layerstream::ops::detail
