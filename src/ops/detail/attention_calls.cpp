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

bool is_square(const AttentionSegment& segment) {
  return segment.num_queries == segment.num_keys;
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

/// The segment without the keys that no query sees.
AttentionSegment trimmed(AttentionSegment segment, std::int64_t window) {
  const std::int64_t unseen = visible_keys(segment, window, std::int64_t{0}).begin;
  segment.first_key += unseen;
  segment.num_keys -= unseen;
  return segment;
}

/// 0 for a window that hides nothing.
std::int64_t effective_window(const AttentionSegment& segment, std::int64_t window) {
  return window < segment.num_keys ? window : 0;
}

/// Whether all are squares of one round extent, each right after the one before it.
bool is_uniform(std::span<const AttentionSegment> segments) {
  const AttentionSegment& first = segments.front();
  if (!is_square(first) || first.num_queries == 0 || !is_round(first.num_queries)) return false;
  for (std::size_t i = 1; i < segments.size(); ++i) {
    const AttentionSegment &before = segments[i - 1], &segment = segments[i];
    if (segment.num_queries != first.num_queries || segment.num_keys != first.num_keys ||
        segment.first_query != before.first_query + before.num_queries ||
        segment.first_key != before.first_key + before.num_keys) {
      return false;
    }
  }
  return true;
}

/// @param most entries of a call
void add_uniform(std::vector<AttentionCall>& calls, std::span<const AttentionSegment> segments,
                 std::int64_t window, std::int64_t most) {
  const AttentionSegment& first = segments.front();
  const std::size_t parts = static_cast<std::size_t>(tiles(static_cast<std::int64_t>(segments.size()), most));
  const std::size_t even = (segments.size() + parts - 1) / parts;  // so that most calls share one plan
  while (!segments.empty()) {
    const auto entries = segments.first(std::min(even, segments.size()));
    calls.push_back({.batch = static_cast<std::int64_t>(entries.size()),
                     .queries = first.num_queries,
                     .keys = first.num_keys,
                     .mask = AttentionMask::causal,
                     .window = effective_window(first, window),
                     .entries = {entries.begin(), entries.end()}});
    segments = segments.subspan(entries.size());
  }
}

AttentionCall single_call(const AttentionSegment& entry, AttentionMask mask, std::int64_t window,
                          bool may_be_exact) {
  const bool exact = may_be_exact && is_round(entry.num_queries) && is_round(entry.num_keys);
  return {.batch = 1,
          .queries = exact ? entry.num_queries : attention_bucket(entry.num_queries),
          .keys = exact ? entry.num_keys : attention_bucket(entry.num_keys),
          .mask = mask,
          .window = window,
          .ragged = !exact,
          .entries = {entry}};
}

/// Gathers squares of like length into ragged calls.
class RaggedCalls {
 public:
  RaggedCalls(std::vector<AttentionCall>& calls, std::int64_t window) : calls_(calls), window_(window) {}

  /// @param most entries of a call
  void add(const AttentionSegment& square, std::int64_t most) {
    const std::int64_t bucket = attention_bucket(square.num_queries);
    const Key key{bucket, effective_window(square, window_)};
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
  std::int64_t window_;
  std::map<Key, std::vector<AttentionSegment>> open_;
};

/// The backward pass of one segment in tiles.
class TiledBackward {
 public:
  TiledBackward(std::vector<AttentionCall>& calls, const AttentionSegment& segment, std::int64_t window)
      : calls_(calls), segment_(segment), window_(effective_window(segment, window)) {}

  void add(const AttentionCost& cost) {
    const std::int64_t tile = window_ == 0 ? cost.tile() : window_tile(cost);
    for (std::int64_t begin = 0; begin < segment_.num_queries; begin += tile) {
      const std::int64_t count = std::min(tile, segment_.num_queries - begin);
      if (window_ == 0) {
        add_queries(begin, count, tile);
      } else {
        add_windowed_queries(begin, count);
      }
    }
  }

 private:
  std::int64_t earlier() const { return segment_.num_keys - segment_.num_queries; }

  /// Bottom-right causal backward computes the masked half as well (measured: half the rate), so the keys
  /// before the block of queries make unmasked rectangles and the rest a square.
  void add_queries(std::int64_t begin, std::int64_t count, std::int64_t tile) {
    const std::int64_t before = earlier() + begin;
    for (std::int64_t key = 0; key < before; key += tile) {
      push({segment_.first_query + begin, count, segment_.first_key + key, std::min(tile, before - key)},
           AttentionMask::none, 0, key == 0 ? Part::first : Part::next);
    }
    push({segment_.first_query + begin, count, segment_.first_key + before, count}, AttentionMask::causal, 0,
         before == 0 ? Part::whole : Part::last);
  }

  /// Bottom-right causal over the keys that the block of queries sees.
  void add_windowed_queries(std::int64_t begin, std::int64_t count) {
    const AttentionSegment block = trimmed(
        {segment_.first_query + begin, count, segment_.first_key, earlier() + begin + count}, window_);
    push(block, is_square(block) ? AttentionMask::causal : AttentionMask::bottom_right,
         effective_window(block, window_), Part::whole);
  }

  std::int64_t window_tile(const AttentionCost& cost) const {
    std::int64_t tile = cost.tile();
    const auto bytes = [&] {
      const std::int64_t queries = attention_bucket(std::min(tile, segment_.num_queries));
      return cost.backward_bytes(1, queries, fine_bucket(std::min(segment_.num_keys, window_ + tile)));
    };
    while (bytes() > attention_plan_bytes) {
      if (tile == shortest_bucket) {
        throw ResourceError(fmt::format(
            "attention_backward: a window of {} keys needs {} bytes of workspace for {} heads of {}, the most "
            "is {}; use fewer keys per row (cutoff_len)",
            window_, bytes(), cost.heads, cost.head_dim, attention_plan_bytes));
      }
      tile /= 2;
    }
    return tile;
  }

  void push(const AttentionSegment& entry, AttentionMask mask, std::int64_t window, Part part) {
    AttentionCall call = single_call(entry, mask, window, true);
    if (call.ragged && window > 0) call.keys = fine_bucket(entry.num_keys);
    call.query_gradient = part;
    calls_.push_back(std::move(call));
  }

  std::vector<AttentionCall>& calls_;
  AttentionSegment segment_;
  std::int64_t window_;
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

std::vector<AttentionCall> attention_forward_calls(std::span<const AttentionSegment> segments,
                                                   std::int64_t window) {
  std::vector<AttentionCall> calls;
  if (segments.empty()) return calls;
  if (is_uniform(segments)) {
    add_uniform(calls, segments, window, static_cast<std::int64_t>(segments.size()));
    return calls;
  }
  RaggedCalls ragged(calls, window);
  for (const AttentionSegment& segment : segments) {
    if (segment.num_queries == 0) continue;
    if (is_square(segment)) {
      ragged.add(segment, attention_call_entries);
    } else {
      const AttentionSegment seen = trimmed(segment, window);
      calls.push_back(single_call(seen, is_square(seen) ? AttentionMask::causal : AttentionMask::bottom_right,
                                  effective_window(seen, window),
                                  seen.num_keys <= planned_chunks * seen.num_queries));
    }
  }
  ragged.finish();
  return calls;
}

std::vector<AttentionCall> attention_backward_calls(std::span<const AttentionSegment> segments,
                                                    std::int64_t window, const AttentionCost& cost) {
  std::vector<AttentionCall> calls;
  const std::int64_t tile = cost.tile();
  while (!segments.empty()) {
    const auto disjoint = segments.first(leading_disjoint(segments));
    segments = segments.subspan(disjoint.size());
    if (is_uniform(disjoint) && disjoint.front().num_queries <= tile) {
      add_uniform(calls, disjoint, window, most_entries(cost, disjoint.front().num_queries));
      continue;
    }
    RaggedCalls ragged(calls, window);
    for (const AttentionSegment& segment : disjoint) {
      if (segment.num_queries == 0) continue;
      if (is_square(segment) && segment.num_queries <= tile) {
        ragged.add(segment, most_ragged_entries(cost, attention_bucket(segment.num_queries)));
      } else {
        TiledBackward(calls, trimmed(segment, window), window).add(cost);
      }
    }
    ragged.finish();
  }
  return calls;
}

}  // namespace layerstream::ops::detail
