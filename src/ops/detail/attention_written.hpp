#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include "ops/detail/attention_calls.hpp"

/// Which rows of dk and dv a pass has written that overwrites them call by call (see AttentionBackward).
namespace layerstream::ops::detail {

class WrittenKeys {
 public:
  /// What has to happen to the rows of one call's keys.
  struct Step {
    bool store;                   ///< the call's part is stored, otherwise added
    std::vector<Interval> clear;  ///< rows to set to zero before it is added
  };

  /// Where no row has been written, the call stores; otherwise those that have not been are cleared first.
  Step write(const AttentionCall& call) {
    Step step{true, {}};
    std::int64_t rows = 0, fresh = 0;
    for (const AttentionSegment& entry : call.entries) {
      rows += entry.num_keys;
      for (const Interval gap : mark({entry.first_key, entry.first_key + entry.num_keys})) {
        fresh += gap.size();
        step.clear.push_back(gap);
      }
    }
    step.store = fresh == rows;
    if (step.store) step.clear.clear();
    return step;
  }

  /// The rows of `rows` that nobody has written, in order; from now on they count as written.
  std::vector<Interval> mark(Interval rows) {
    std::vector<Interval> gaps;
    auto run = runs_.upper_bound(rows.begin);
    if (run != runs_.begin() && std::prev(run)->second >= rows.begin) --run;
    std::int64_t next = rows.begin;
    Interval joined = rows;
    while (run != runs_.end() && run->first <= rows.end) {
      if (run->first > next) gaps.push_back({next, run->first});
      next = std::max(next, run->second);
      joined = {std::min(joined.begin, run->first), std::max(joined.end, run->second)};
      run = runs_.erase(run);
    }
    if (next < rows.end) gaps.push_back({next, rows.end});
    runs_.emplace(joined.begin, joined.end);
    return gaps;
  }

 private:
  std::map<std::int64_t, std::int64_t> runs_;  // begin to end; they neither overlap nor touch
};

}  // namespace layerstream::ops::detail
