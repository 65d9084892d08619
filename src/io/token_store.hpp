#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream::io {

/// A document within a TokenStore.
struct StoredDocument {
  std::int64_t begin;   ///< index of its first token in the store
  std::int64_t length;  ///< tokens
  std::int64_t source;  ///< which file
  std::int64_t number;  ///< of the document within its file, from 0
};

struct TokenSource {
  std::string path;
  bool is_text;          ///< else a token shard
  bool single_document;  ///< the file's name alone names the document
};

/// Tokens of documents one after another: two bytes per token where the vocabulary allows it, else four,
/// and one bit per token for the target mask once any token is not a target.
class TokenStore {
 public:
  /// Throws ConfigError unless 1 <= vocab_size < 2^31.
  explicit TokenStore(std::int64_t vocab_size);

  void reserve(std::int64_t num_tokens);

  // Building: a file, then its documents, each appended in parts and either finished or taken back. Ids must
  // lie within the vocabulary.
  void begin_source(TokenSource source);
  void begin_document(std::int64_t number);
  void append_bytes(std::string_view bytes);
  void append_token(std::int32_t id, bool is_target = true);
  /// Tokens of the document so far.
  std::int64_t document_length() const { return num_tokens() - document_begin_; }
  void finish_document();
  void discard_document();
  void shrink_to_fit();

  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t num_tokens() const;
  std::span<const StoredDocument> documents() const { return documents_; }
  const TokenSource& source(const StoredDocument& document) const {
    return sources_[static_cast<std::size_t>(document.source)];
  }
  /// "corpus.txt" or "shard.safetensors: document 3".
  std::string place(const StoredDocument& document) const;

  /// Copies tokens [begin, begin + ids.size()).
  void copy_tokens(std::int64_t begin, std::span<std::int32_t> ids) const;
  bool is_target(std::int64_t token) const;
  std::int64_t count_targets(std::int64_t begin, std::int64_t end) const;

  /// Host memory held.
  std::size_t bytes() const;

 private:
  std::int64_t vocab_size_;
  bool narrow_;
  std::vector<std::uint16_t> narrow_tokens_;  // if narrow_
  std::vector<std::int32_t> wide_tokens_;     // if not
  std::vector<bool> target_mask_;             // empty: every token is a target
  std::vector<StoredDocument> documents_;
  std::vector<TokenSource> sources_;
  std::int64_t document_begin_ = 0;
  std::int64_t document_number_ = 0;
};

}  // namespace layerstream::io
