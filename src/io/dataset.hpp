#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/run_config.hpp"
#include "core/token_row.hpp"
#include "io/dataset_report.hpp"
#include "io/packing.hpp"
#include "io/token_store.hpp"

namespace layerstream::io {

struct DatasetOptions {
  std::vector<std::string> inputs;  ///< text files, directories, token shards (*.safetensors)
  std::string key = "train_file";   ///< of the configuration that names them, for messages
  std::int64_t vocab_size = 0;      ///< of the model
  std::int64_t cutoff_len = 2048;
  bool packing = true;
  Overlong overlong = Overlong::split;
  OnBadLine on_bad_line = OnBadLine::error;
  /// Called between pieces of work (at most some 64 MiB of text, or 2^20 tokens) with the bytes of input read
  /// so far; may throw to stop.
  std::function<void(std::int64_t bytes_done, std::int64_t bytes_total)> between_pieces = {};
};

/// The data keys of a run, with train_file for inputs.
DatasetOptions dataset_options(const RunConfig& config, std::int64_t vocab_size);

/// Training data: rows of tokens, built on demand from compact storage. Immutable after load.
class Dataset {
 public:
  /// Reads everything. Throws ConfigError or FileError, with the place and the remedy, for whatever `options`
  /// do not say to skip, and when no row with a target is left; and what `between_pieces` throws.
  static Dataset load(const DatasetOptions& options);

  std::int64_t num_rows() const { return rows_.num_rows(); }
  /// Of all rows.
  std::int64_t num_tokens() const { return report_.tokens; }

  /// targets[i] is the token after input_ids[i] in the same piece if that token is a target, else −100.
  TokenRow row(std::int64_t i) const;
  /// row(i).num_tokens() and row(i).num_targets(), without building the row.
  std::int64_t row_tokens(std::int64_t i) const;
  std::int64_t row_targets(std::int64_t i) const;
  /// Targets of several rows: the divisor of a step's loss.
  std::int64_t count_targets(std::span<const std::int64_t> rows) const;

  /// Where the row came from: "corpus.txt: tokens 0 to 2047" (both inclusive, counted from 0 in the
  /// document).
  std::string row_place(std::int64_t i) const;
  std::span<const RowPiece> row_pieces(std::int64_t i) const { return rows_.row(i); }
  /// "corpus.txt: tokens 0 to 2047", or the document alone where the piece is all of it.
  std::string piece_place(const RowPiece& piece) const;
  const TokenSource& piece_source(const RowPiece& piece) const;
  /// Whether the piece's tokens are those of the byte tokenizer: for sure of text, else by the vocabulary.
  bool has_byte_tokens(const RowPiece& piece) const;

  const DatasetReport& report() const { return report_; }
  /// For resume: a checkpoint's data order means the same rows only if this is equal.
  std::uint64_t content_hash() const { return report_.content_hash; }
  /// Host memory held.
  std::size_t bytes() const { return store_.bytes() + rows_.bytes(); }

 private:
  Dataset(TokenStore store, DatasetReport report) : store_(std::move(store)), report_(std::move(report)) {}

  std::int64_t piece_targets(const RowPiece& piece) const;
  /// Also counts what the others hold.
  void drop_rows_without_targets();
  void complete_report(std::int64_t cutoff_len, const std::function<void()>& poll);
  void read_all_rows(const std::function<void()>& poll);

  TokenStore store_;
  DatasetReport report_;
  PackedRows rows_;
};

}  // namespace layerstream::io
