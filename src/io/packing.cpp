#include "io/packing.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace layerstream::io {

std::span<const RowPiece> PackedRows::row(std::int64_t i) const {
  LAYERSTREAM_EXPECT(i >= 0 && i < num_rows(), "row {} of {}", i, num_rows());
  const std::int64_t begin = i == 0 ? 0 : row_ends_[static_cast<std::size_t>(i - 1)];
  const std::int64_t end = row_ends_[static_cast<std::size_t>(i)];
  return std::span(pieces_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
}

void PackedRows::append(const RowPiece& piece) {
  LAYERSTREAM_EXPECT(!row_ends_.empty(), "begin_row comes first");
  pieces_.push_back(piece);
  ++row_ends_.back();
}

void PackedRows::shrink_to_fit() {
  pieces_.shrink_to_fit();
  row_ends_.shrink_to_fit();
}

std::size_t PackedRows::bytes() const {
  return pieces_.capacity() * sizeof(RowPiece) + row_ends_.capacity() * sizeof(std::int64_t);
}

namespace {

class RowPacker {
 public:
  explicit RowPacker(const PackingOptions& options) : options_(options) {}

  /// A piece that must not lie in two rows.
  void lay_whole(std::int64_t document, std::int64_t length) {
    if (room_ < length || !options_.packing) begin_row();
    append({document, 0, length});
  }

  /// Fills what is left of the row, then further rows. Returns in how many rows the document lies.
  std::int64_t lay_split(std::int64_t document, std::int64_t length) {
    if (!options_.packing) room_ = 0;
    std::int64_t parts = 0;
    for (std::int64_t offset = 0; offset < length; ++parts) {
      if (room_ == 0) begin_row();
      const std::int64_t part = std::min(room_, length - offset);
      append({document, offset, part});
      offset += part;
    }
    return parts;
  }

  PackedRows take_rows() { return std::move(rows_); }

 private:
  void begin_row() {
    rows_.begin_row();
    room_ = options_.cutoff_len;
  }
  void append(const RowPiece& piece) {
    rows_.append(piece);
    room_ -= piece.length;
  }

  PackingOptions options_;
  PackedRows rows_;
  std::int64_t room_ = 0;  // tokens left in the row begun last
};

/// Whether the document has a token, but for the first, that nothing is to predict.
bool has_context(const TokenStore& store, const StoredDocument& document) {
  return store.count_targets(document.begin + 1, document.begin + document.length) < document.length - 1;
}

}  // namespace

PackedRows pack_rows(const TokenStore& store, const PackingOptions& options, DatasetReport& report) {
  if (options.cutoff_len < 2) {
    throw ConfigError(
        fmt::format("cutoff_len: {} leaves no token to predict; it must be at least 2", options.cutoff_len));
  }
  RowPacker packer(options);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(store.documents().size()); ++i) {
    const StoredDocument& document = store.documents()[static_cast<std::size_t>(i)];
    const bool fits = document.length <= options.cutoff_len;
    if (options.overlong == Overlong::split && !(fits && has_context(store, document))) {
      report.documents_split += packer.lay_split(i, document.length) > 1 ? 1 : 0;
      continue;
    }
    if (fits) {
      packer.lay_whole(i, document.length);
      continue;
    }
    const std::string place = fmt::format("{}: {} tokens", store.place(document), document.length);
    switch (options.overlong) {
      case Overlong::truncate:
        packer.lay_whole(i, options.cutoff_len);
        report.documents_truncated.add(place);
        report.tokens_truncated += document.length - options.cutoff_len;
        break;
      case Overlong::drop:
        report.documents_dropped.add(place);
        report.tokens_dropped += document.length;
        break;
      default:
        throw FileError(
            fmt::format("{} are more than cutoff_len: {}; raise it, or set overlong: split | truncate | drop",
                        place, options.cutoff_len));
    }
  }
  return packer.take_rows();
}

}  // namespace layerstream::io
