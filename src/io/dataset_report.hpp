#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace layerstream::io {

/// How often something happened, and where the first few times.
struct Places {
  static constexpr std::size_t remembered = 5;

  std::int64_t count = 0;
  std::vector<std::string> first;

  void add(std::string place) {
    ++count;
    if (first.size() < remembered) first.push_back(std::move(place));
  }
};

/// Nearest-rank percentiles: p is the smallest value with at least p% of all values at or below it; p0 is
/// the smallest of all. Zeros when there are no values.
struct LengthPercentiles {
  std::int64_t p0 = 0;
  std::int64_t p50 = 0;
  std::int64_t p90 = 0;
  std::int64_t p99 = 0;
  std::int64_t max = 0;
};

LengthPercentiles length_percentiles(std::span<const std::int64_t> lengths);

/// What came from one file.
struct SourceCounts {
  std::string path;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

/// What was read, what became of it, and what was left out, known before step 0.
struct DatasetReport {
  // What was read
  std::int64_t text_files = 0;
  std::int64_t token_shards = 0;
  std::int64_t documents = 0;
  std::int64_t document_tokens = 0;    ///< of all documents, ends of documents included
  std::vector<SourceCounts> sources;   ///< files that have documents, as they were read
  LengthPercentiles document_lengths;  ///< tokens of a document as read, before `overlong` applies

  // What becomes training data
  std::int64_t rows = 0;
  std::int64_t tokens = 0;   ///< in those rows
  std::int64_t targets = 0;  ///< tokens that are predicted
  std::int64_t pieces = 0;   ///< documents or parts of one in those rows; each has a context of its own
  std::int64_t cutoff_len = 0;
  /// Nats per target of the targets' own frequencies: the loss of a model that knows nothing else.
  double unigram_entropy = 0.0;

  // What became of documents longer than a row
  std::int64_t documents_split = 0;  ///< laid into more than one row
  Places documents_truncated;
  std::int64_t tokens_truncated = 0;
  Places documents_dropped;
  std::int64_t tokens_dropped = 0;

  // What was left out
  Places rows_without_targets;
  Places empty_files;
  Places empty_documents;
  Places binary_files;   ///< with a NUL byte
  Places hidden;         ///< files and directories whose name begins with a dot
  Places special_files;  ///< neither file nor directory
  Places bad_lines;      ///< not UTF-8, under on_bad_line: skip
  Places bad_documents;  ///< of token shards: ids or mask values out of range, under on_bad_line: skip

  /// XXH3-64 over rows, tokens, targets and document starts; equal hashes mean equal training data.
  std::uint64_t content_hash = 0;

  /// Several lines for people; what did not happen has no line.
  std::string to_text() const;
};

}  // namespace layerstream::io
