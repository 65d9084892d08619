#include "io/inspect.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "io/byte_tokenizer.hpp"

namespace layerstream::io {

namespace {

/// Control characters would break the table.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      result += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
  }
  return result;
}

/// The text of an id that is a token of `piece`.
std::string text_of(const Dataset& dataset, const RowPiece& piece, std::int32_t id,
                    const InspectOptions& options) {
  const TokenSource& source = dataset.piece_source(piece);
  std::string text;
  if (!source.is_text && options.token_text) text = escaped(options.token_text(source.path, id));
  if (text.empty() && dataset.has_byte_tokens(piece)) text = ByteTokenizer::token_text(id);
  return text;
}

/// One line per token of row tokens [begin, end), which lie in one piece that begins at `piece_begin`.
void append_tokens(std::string& text, const TokenRow& row, std::int64_t piece_begin, std::int64_t end,
                   const std::function<std::string(std::int32_t)>& text_of_id) {
  const auto out = std::back_inserter(text);
  for (std::int64_t i = piece_begin; i < end; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const std::int32_t target = row.targets[index];
    const bool is_trained_on = i > piece_begin && row.targets[index - 1] >= 0;
    const std::string prediction = target < 0 ? "-" : fmt::format("{} {}", target, text_of_id(target));
    fmt::format_to(out, "{:>8} {:>8} {:>8}  {:<20} {:<7} {}\n", i, i - piece_begin, row.input_ids[index],
                   text_of_id(row.input_ids[index]), is_trained_on ? "yes" : "no", prediction);
  }
}

void append_row(std::string& text, const Dataset& dataset, std::int64_t i, const InspectOptions& options) {
  const auto out = std::back_inserter(text);
  const TokenRow row = dataset.row(i);
  const std::int64_t shown = std::min(row.num_tokens(), options.tokens_per_row);
  fmt::format_to(out, "\nrow {}: {} tokens, {} targets, {} pieces\n", i, row.num_tokens(), row.num_targets(),
                 row.document_starts.size());
  fmt::format_to(out, "{:>8} {:>8} {:>8}  {:<20} {:<7} {}\n", "token", "position", "id", "text", "target",
                 "predicts");
  std::int64_t begin = 0;
  for (const RowPiece& piece : dataset.row_pieces(i)) {
    if (begin >= shown) break;
    fmt::format_to(out, "-- {} ({} tokens)\n", dataset.piece_place(piece), piece.length);
    append_tokens(text, row, begin, std::min(begin + piece.length, shown),
                  [&](std::int32_t id) { return text_of(dataset, piece, id, options); });
    begin += piece.length;
  }
  if (shown < row.num_tokens()) fmt::format_to(out, "   and {} more tokens\n", row.num_tokens() - shown);
}

}  // namespace

std::string inspect(const Dataset& dataset, const InspectOptions& options) {
  std::string text = dataset.report().to_text();
  const std::int64_t num_rows = std::min(options.num_rows, dataset.num_rows());
  for (std::int64_t i = 0; i < num_rows; ++i) append_row(text, dataset, i, options);
  return text;
}

}  // namespace layerstream::io
