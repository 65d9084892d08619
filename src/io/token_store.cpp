#include "io/token_store.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"

namespace layerstream::io {

TokenStore::TokenStore(std::int64_t vocab_size)
    : vocab_size_(vocab_size), narrow_(vocab_size <= std::numeric_limits<std::uint16_t>::max() + 1) {
  if (vocab_size < 1 || vocab_size > std::numeric_limits<std::int32_t>::max()) {
    throw ConfigError(fmt::format("vocab_size: {} is not in [1, 2^31)", vocab_size));
  }
}

void TokenStore::reserve(std::int64_t num_tokens) {
  if (narrow_) {
    narrow_tokens_.reserve(static_cast<std::size_t>(num_tokens));
  } else {
    wide_tokens_.reserve(static_cast<std::size_t>(num_tokens));
  }
}

void TokenStore::begin_source(TokenSource source) {
  sources_.push_back(std::move(source));
}

void TokenStore::begin_document(std::int64_t number) {
  LAYERSTREAM_EXPECT(!sources_.empty(), "a document belongs to a source");
  LAYERSTREAM_EXPECT(document_length() == 0, "the document before was neither finished nor discarded");
  document_number_ = number;
}

void TokenStore::append_bytes(std::string_view bytes) {
  const auto as_id = [](char c) { return static_cast<unsigned char>(c); };
  if (narrow_) {
    std::transform(bytes.begin(), bytes.end(), std::back_inserter(narrow_tokens_), as_id);
  } else {
    std::transform(bytes.begin(), bytes.end(), std::back_inserter(wide_tokens_), as_id);
  }
  if (!target_mask_.empty()) target_mask_.resize(static_cast<std::size_t>(num_tokens()), true);
}

void TokenStore::append_token(std::int32_t id, bool is_target) {
  LAYERSTREAM_EXPECT(id >= 0 && id < vocab_size_, "token {} of a vocabulary of {}", id, vocab_size_);
  if (!is_target && target_mask_.empty()) target_mask_.assign(static_cast<std::size_t>(num_tokens()), true);
  if (narrow_) {
    narrow_tokens_.push_back(static_cast<std::uint16_t>(id));
  } else {
    wide_tokens_.push_back(id);
  }
  if (!is_target || !target_mask_.empty()) target_mask_.push_back(is_target);
}

void TokenStore::finish_document() {
  documents_.push_back(
      {document_begin_, document_length(), static_cast<std::int64_t>(sources_.size()) - 1, document_number_});
  document_begin_ = num_tokens();
}

void TokenStore::discard_document() {
  const auto begin = static_cast<std::size_t>(document_begin_);
  if (narrow_) {
    narrow_tokens_.resize(begin);
  } else {
    wide_tokens_.resize(begin);
  }
  if (!target_mask_.empty()) target_mask_.resize(begin);
}

void TokenStore::shrink_to_fit() {
  narrow_tokens_.shrink_to_fit();
  wide_tokens_.shrink_to_fit();
  target_mask_.shrink_to_fit();
  documents_.shrink_to_fit();
}

std::int64_t TokenStore::num_tokens() const {
  return static_cast<std::int64_t>(narrow_ ? narrow_tokens_.size() : wide_tokens_.size());
}

std::string TokenStore::place(const StoredDocument& document) const {
  const TokenSource& file = source(document);
  return file.single_document ? file.path : fmt::format("{}: document {}", file.path, document.number);
}

void TokenStore::copy_tokens(std::int64_t begin, std::span<std::int32_t> ids) const {
  LAYERSTREAM_EXPECT(begin >= 0 && begin + static_cast<std::int64_t>(ids.size()) <= num_tokens(),
                     "tokens [{}, {}) of {}", begin, begin + static_cast<std::int64_t>(ids.size()),
                     num_tokens());
  if (narrow_) {
    std::copy_n(narrow_tokens_.begin() + begin, ids.size(), ids.begin());
  } else {
    std::copy_n(wide_tokens_.begin() + begin, ids.size(), ids.begin());
  }
}

bool TokenStore::is_target(std::int64_t token) const {
  return target_mask_.empty() || target_mask_[static_cast<std::size_t>(token)];
}

std::int64_t TokenStore::count_targets(std::int64_t begin, std::int64_t end) const {
  if (target_mask_.empty()) return end - begin;
  return std::count(target_mask_.begin() + begin, target_mask_.begin() + end, true);
}

std::size_t TokenStore::bytes() const {
  return narrow_tokens_.capacity() * sizeof(std::uint16_t) + wide_tokens_.capacity() * sizeof(std::int32_t) +
         target_mask_.capacity() / 8 + documents_.capacity() * sizeof(StoredDocument);
}

}  // namespace layerstream::io
