#include "io/dataset_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>

namespace layerstream::io {

namespace {

void append_places(std::string& text, std::string_view what, const Places& places,
                   std::string_view detail = "") {
  if (places.count == 0) return;
  fmt::format_to(std::back_inserter(text), "{}: {}{}\n", what, places.count, detail);
  for (const std::string& place : places.first) {
    fmt::format_to(std::back_inserter(text), "    {}\n", place);
  }
  const std::int64_t more = places.count - static_cast<std::int64_t>(places.first.size());
  if (more > 0) fmt::format_to(std::back_inserter(text), "    and {} more\n", more);
}

/// One file is told by the line before.
void append_sources(std::string& text, const std::vector<SourceCounts>& sources) {
  constexpr std::size_t shown = 10;
  if (sources.size() < 2) return;
  const auto out = std::back_inserter(text);
  for (std::size_t i = 0; i < std::min(shown, sources.size()); ++i) {
    fmt::format_to(out, "    {}: {} documents, {} tokens\n", sources[i].path, sources[i].documents,
                   sources[i].tokens);
  }
  if (sources.size() > shown) fmt::format_to(out, "    and {} more files\n", sources.size() - shown);
}

}  // namespace

LengthPercentiles length_percentiles(std::span<const std::int64_t> lengths) {
  if (lengths.empty()) return {};
  std::vector<std::int64_t> sorted(lengths.begin(), lengths.end());
  std::sort(sorted.begin(), sorted.end());
  const auto at_percent = [&](std::size_t percent) {
    const std::size_t rank = (sorted.size() * percent + 99) / 100;
    return sorted[std::max<std::size_t>(rank, 1) - 1];
  };
  return {sorted.front(), at_percent(50), at_percent(90), at_percent(99), sorted.back()};
}

std::string DatasetReport::to_text() const {
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "read: {} text files, {} token shards, {} documents, {} tokens\n", text_files,
                 token_shards, documents, document_tokens);
  append_sources(text, sources);
  fmt::format_to(out, "document lengths in tokens: min {}, p50 {}, p90 {}, p99 {}, max {}\n",
                 document_lengths.p0, document_lengths.p50, document_lengths.p90, document_lengths.p99,
                 document_lengths.max);
  const double capacity = static_cast<double>(rows) * static_cast<double>(cutoff_len);
  fmt::format_to(out, "rows: {} of up to {} tokens, {:.1f}% full: {} tokens, {} targets, {} pieces\n", rows,
                 cutoff_len, capacity > 0 ? 100.0 * static_cast<double>(tokens) / capacity : 0.0, tokens,
                 targets, pieces);
  fmt::format_to(out, "loss of a model that knows token frequencies alone: {:.4f}\n", unigram_entropy);
  if (documents_split > 0) fmt::format_to(out, "documents split over rows: {}\n", documents_split);
  append_places(text, "documents truncated", documents_truncated,
                fmt::format(", {} tokens lost", tokens_truncated));
  append_places(text, "documents dropped as longer than a row", documents_dropped,
                fmt::format(", {} tokens lost", tokens_dropped));
  append_places(text, "rows dropped for having no target", rows_without_targets);
  append_places(text, "lines skipped as not UTF-8", bad_lines);
  append_places(text, "documents skipped for bad values", bad_documents);
  append_places(text, "empty files skipped", empty_files);
  append_places(text, "empty documents skipped", empty_documents);
  append_places(text, "binary files (with a NUL byte) skipped", binary_files);
  append_places(text, "hidden files and directories skipped", hidden);
  append_places(text, "special files skipped", special_files);
  fmt::format_to(out, "content hash: {:016x}\n", content_hash);
  return text;
}

}  // namespace layerstream::io
