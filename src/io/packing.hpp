#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/run_config.hpp"
#include "io/dataset_report.hpp"
#include "io/token_store.hpp"

namespace layerstream::io {

/// A run of tokens of one document that lies in one row. Its tokens attend to each other only, and positions
/// restart with it.
struct RowPiece {
  std::int64_t document;  ///< index in TokenStore::documents()
  std::int64_t offset;    ///< of its first token in the document
  std::int64_t length;
};

struct PackingOptions {
  std::int64_t cutoff_len;  ///< tokens of a row, at least 2
  bool packing;             ///< several pieces in a row
  Overlong overlong;        ///< documents longer than a row
};

/// Rows as lists of pieces.
class PackedRows {
 public:
  std::int64_t num_rows() const { return static_cast<std::int64_t>(row_ends_.size()); }
  std::span<const RowPiece> row(std::int64_t i) const;

  void begin_row() { row_ends_.push_back(static_cast<std::int64_t>(pieces_.size())); }
  /// Into the row begun last.
  void append(const RowPiece& piece);

  void shrink_to_fit();
  std::size_t bytes() const;

 private:
  std::vector<RowPiece> pieces_;
  std::vector<std::int64_t> row_ends_;  // index into pieces_ behind each row's last
};

/// Lays documents into rows in their order.
///
/// packing: a row takes documents until the next does not fit. With Overlong::split it takes the part that
/// fits, and the rest of the document continues in the next row as a piece of its own: rows are full. But for
/// documents that a row can hold and that have tokens which are no targets: those are what the targets answer
/// to. Otherwise no document lies in two rows. Without packing each document (or part of cutoff_len tokens)
/// is a row.
///
/// Truncated, dropped and split documents are noted in `report`. Throws FileError with the document's name
/// and length for one longer than a row under Overlong::error, ConfigError if cutoff_len < 2.
PackedRows pack_rows(const TokenStore& store, const PackingOptions& options, DatasetReport& report);

}  // namespace layerstream::io
