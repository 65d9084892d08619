#pragma once

#include <cstdint>
#include <vector>

namespace layerstream {

/// One row of training data: the tokens of one or more documents, one after another.
struct TokenRow {
  std::vector<std::int32_t> input_ids;
  /// targets[i] is the token that input_ids[0..i] of its document should predict, or −100 for none;
  /// same length as input_ids. The last token of a document has no target.
  std::vector<std::int32_t> targets;
  /// Index of each document's first token, ascending, the first one 0. Tokens attend within their
  /// document only, and positions restart with it.
  std::vector<std::int64_t> document_starts;

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(input_ids.size()); }
  std::int64_t num_targets() const {
    std::int64_t count = 0;
    for (const std::int32_t target : targets) count += target >= 0 ? 1 : 0;
    return count;
  }
};

}  // namespace layerstream
