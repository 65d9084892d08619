#include "io/dataset.hpp"

#include <array>
#include <cmath>

#include "core/error.hpp"
#include "io/byte_tokenizer.hpp"
#include "io/content_hash.hpp"
#include "io/input_files.hpp"
#include "io/text_source.hpp"
#include "io/token_shard.hpp"

namespace layerstream::io {

namespace {

constexpr std::int32_t no_target = -100;

TokenStore read_inputs(const DatasetOptions& options, DatasetReport& report) {
  const std::vector<InputFile> files = find_input_files(options.inputs, report, options.key);
  TokenStore store(options.vocab_size);
  std::int64_t text_tokens = 0;
  std::int64_t total_bytes = 0;
  for (const InputFile& file : files) {
    text_tokens += file.is_shard ? 0 : file.bytes + 1;
    total_bytes += file.bytes;
  }
  store.reserve(text_tokens);

  std::int64_t done_bytes = 0;  // of the files before this one
  const PieceCallback piece_done = [&](std::int64_t bytes) {
    if (options.between_pieces) options.between_pieces(done_bytes + bytes, total_bytes);
  };
  for (const InputFile& file : files) {
    piece_done(0);
    if (file.is_shard) {
      read_token_shard(file, options.on_bad_line, store, report, piece_done);
      done_bytes += file.bytes;
      continue;
    }
    if (options.vocab_size < ByteTokenizer::vocab_size) {
      throw ConfigError(
          fmt::format("{}: '{}' is text, whose byte tokens need a vocab_size of {}, but the "
                      "model has {}; enlarge the model's vocabulary or prepare token shards",
                      options.key, file.path.string(), ByteTokenizer::vocab_size, options.vocab_size));
    }
    read_text_file(file, options.on_bad_line, store, report, piece_done);
    done_bytes += file.bytes;
  }
  store.shrink_to_fit();
  return store;
}

}  // namespace

DatasetOptions dataset_options(const RunConfig& config, std::int64_t vocab_size) {
  return {.inputs = config.train_file,
          .vocab_size = vocab_size,
          .cutoff_len = config.cutoff_len,
          .packing = config.packing,
          .overlong = config.overlong,
          .on_bad_line = config.on_bad_line};
}

Dataset Dataset::load(const DatasetOptions& options) {
  DatasetReport report;
  TokenStore store = read_inputs(options, report);
  Dataset dataset(std::move(store), std::move(report));
  dataset.rows_ =
      pack_rows(dataset.store_, {options.cutoff_len, options.packing, options.overlong}, dataset.report_);
  dataset.drop_rows_without_targets();
  dataset.complete_report(options.cutoff_len, [&] {
    if (options.between_pieces) options.between_pieces(1, 1);
  });
  if (dataset.num_rows() == 0) {
    throw FileError(options.key + ": no row with a token to predict\n" + dataset.report_.to_text());
  }
  return dataset;
}

TokenRow Dataset::row(std::int64_t i) const {
  const auto num_tokens = static_cast<std::size_t>(row_tokens(i));
  TokenRow row;
  row.input_ids.resize(num_tokens);
  row.targets.resize(num_tokens);
  row.document_starts.reserve(rows_.row(i).size());
  std::size_t begin = 0;
  for (const RowPiece& piece : rows_.row(i)) {
    const auto length = static_cast<std::size_t>(piece.length);
    const std::span ids = std::span(row.input_ids).subspan(begin, length);
    const std::span targets = std::span(row.targets).subspan(begin, length);
    const std::int64_t stored =
        store_.documents()[static_cast<std::size_t>(piece.document)].begin + piece.offset;
    store_.copy_tokens(stored, ids);
    for (std::size_t k = 0; k + 1 < length; ++k) {
      targets[k] = store_.is_target(stored + static_cast<std::int64_t>(k) + 1) ? ids[k + 1] : no_target;
    }
    targets[length - 1] = no_target;
    row.document_starts.push_back(static_cast<std::int64_t>(begin));
    begin += length;
  }
  return row;
}

std::int64_t Dataset::row_tokens(std::int64_t i) const {
  std::int64_t tokens = 0;
  for (const RowPiece& piece : rows_.row(i)) tokens += piece.length;
  return tokens;
}

std::int64_t Dataset::piece_targets(const RowPiece& piece) const {
  const std::int64_t begin =
      store_.documents()[static_cast<std::size_t>(piece.document)].begin + piece.offset;
  return store_.count_targets(begin + 1, begin + piece.length);
}

std::int64_t Dataset::row_targets(std::int64_t i) const {
  std::int64_t targets = 0;
  for (const RowPiece& piece : rows_.row(i)) targets += piece_targets(piece);
  return targets;
}

std::int64_t Dataset::count_targets(std::span<const std::int64_t> rows) const {
  std::int64_t targets = 0;
  for (const std::int64_t row : rows) targets += row_targets(row);
  return targets;
}

std::string Dataset::piece_place(const RowPiece& piece) const {
  const StoredDocument& document = store_.documents()[static_cast<std::size_t>(piece.document)];
  const std::string place = store_.place(document);
  if (piece.offset == 0 && piece.length == document.length) return place;
  return fmt::format("{}: tokens {} to {}", place, piece.offset, piece.offset + piece.length - 1);
}

std::string Dataset::row_place(std::int64_t i) const {
  const std::span<const RowPiece> pieces = rows_.row(i);
  if (pieces.size() == 1) return piece_place(pieces.front());
  return fmt::format("{} to {}", piece_place(pieces.front()), piece_place(pieces.back()));
}

const TokenSource& Dataset::piece_source(const RowPiece& piece) const {
  return store_.source(store_.documents()[static_cast<std::size_t>(piece.document)]);
}

bool Dataset::has_byte_tokens(const RowPiece& piece) const {
  return piece_source(piece).is_text || store_.vocab_size() == ByteTokenizer::vocab_size;
}

void Dataset::drop_rows_without_targets() {
  PackedRows kept;
  for (std::int64_t i = 0; i < num_rows(); ++i) {
    const std::int64_t targets = row_targets(i);
    if (targets == 0) {
      report_.rows_without_targets.add(row_place(i));
      continue;
    }
    kept.begin_row();
    for (const RowPiece& piece : rows_.row(i)) kept.append(piece);
    report_.targets += targets;
    report_.tokens += row_tokens(i);
    report_.pieces += static_cast<std::int64_t>(rows_.row(i).size());
  }
  kept.shrink_to_fit();
  rows_ = std::move(kept);
  report_.rows = num_rows();
}

namespace {

/// Of the distribution that the counts estimate, in nats; 0 when all are 0.
double entropy(std::span<const std::int64_t> counts) {
  double sum = 0.0;
  double weighted = 0.0;
  for (const std::int64_t count : counts) {
    if (count == 0) continue;
    const double c = static_cast<double>(count);
    sum += c;
    weighted += c * std::log(c);
  }
  return sum > 0.0 ? std::log(sum) - weighted / sum : 0.0;
}

}  // namespace

void Dataset::complete_report(std::int64_t cutoff_len, const std::function<void()>& poll) {
  std::vector<std::int64_t> lengths;
  lengths.reserve(store_.documents().size());
  std::int64_t source = -1;  // of the document before: those of a file follow each other
  for (const StoredDocument& document : store_.documents()) {
    lengths.push_back(document.length);
    if (document.source != source) report_.sources.push_back({store_.source(document).path});
    source = document.source;
    ++report_.sources.back().documents;
    report_.sources.back().tokens += document.length;
  }
  report_.documents = static_cast<std::int64_t>(lengths.size());
  report_.document_tokens = store_.num_tokens();
  report_.document_lengths = length_percentiles(lengths);
  report_.cutoff_len = cutoff_len;
  read_all_rows(poll);
}

void Dataset::read_all_rows(const std::function<void()>& poll) {
  constexpr std::int64_t tokens_between_polls = 1 << 20;
  ContentHash hash;
  std::vector<std::int64_t> occurrences(static_cast<std::size_t>(store_.vocab_size()), 0);
  std::int64_t unpolled = 0;
  for (std::int64_t i = 0; i < num_rows(); ++i) {
    const TokenRow row = this->row(i);
    unpolled += row.num_tokens();
    if (unpolled >= tokens_between_polls) {
      poll();
      unpolled = 0;
    }
    const std::array<std::int64_t, 2> counts{row.num_tokens(),
                                             static_cast<std::int64_t>(row.document_starts.size())};
    hash.update(std::as_bytes(std::span(counts)));
    hash.update(std::as_bytes(std::span(row.document_starts)));
    hash.update(std::as_bytes(std::span(row.input_ids)));
    hash.update(std::as_bytes(std::span(row.targets)));
    for (const std::int32_t target : row.targets) {
      if (target != no_target) ++occurrences[static_cast<std::size_t>(target)];
    }
  }
  report_.content_hash = hash.digest();
  report_.unigram_entropy = entropy(occurrences);
}

}  // namespace layerstream::io
