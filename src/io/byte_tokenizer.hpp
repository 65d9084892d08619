#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream::io {

/// The built-in tokenizer: token 0..255 is that byte, 256 ends a document. It needs no files and loses
/// nothing.
struct ByteTokenizer {
  static constexpr std::int32_t end_of_document = 256;
  static constexpr std::int64_t vocab_size = 257;

  /// One token per byte, without an end of document.
  static std::vector<std::int32_t> encode(std::string_view text);

  /// Always valid UTF-8: ids outside the vocabulary and ill-formed byte sequences (a model may produce
  /// both) become U+FFFD, the end of a document becomes nothing.
  static std::string decode(std::span<const std::int32_t> ids);

  /// One token for people, ASCII only: 'a', '\n', '\xc3', <end of document>; ids outside the vocabulary:
  /// <300>.
  static std::string token_text(std::int32_t id);
};

}  // namespace layerstream::io
