#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "io/dataset.hpp"

namespace layerstream::io {

struct InspectOptions {
  std::int64_t num_rows = 2;          ///< from the first
  std::int64_t tokens_per_row = 256;  ///< further tokens of a row are only counted
  /// Text of a token of a shard, empty if unknown. Such tokens have no text, unless the vocabulary is the
  /// byte tokenizer's.
  std::function<std::string(const std::string& shard, std::int32_t id)> token_text;
};

/// What `inspect-data` prints: the report, then for each row a line per token: its position in its piece, id,
/// text, whether it is trained on (some token before it is to predict it), and what it is to predict.
std::string inspect(const Dataset& dataset, const InspectOptions& options);

}  // namespace layerstream::io
