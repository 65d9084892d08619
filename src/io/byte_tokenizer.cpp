#include "io/byte_tokenizer.hpp"

#include <fmt/format.h>

#include "io/utf8.hpp"

namespace layerstream::io {

namespace {

constexpr std::string_view replacement_character = "\xef\xbf\xbd";  // U+FFFD

/// Appends `bytes` with each ill-formed sequence replaced.
void append_repaired(std::string& text, std::string_view bytes) {
  while (const auto fault = find_utf8_fault(bytes)) {
    text.append(bytes.substr(0, fault->offset)).append(replacement_character);
    bytes.remove_prefix(fault->offset + fault->length);
  }
  text.append(bytes);
}

}  // namespace

std::vector<std::int32_t> ByteTokenizer::encode(std::string_view text) {
  std::vector<std::int32_t> ids;
  ids.reserve(text.size());
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> ids) {
  std::string text;
  std::string bytes;  // since the last token that is not a byte
  for (const std::int32_t id : ids) {
    if (id >= 0 && id <= 0xff) {
      bytes.push_back(static_cast<char>(static_cast<unsigned char>(id)));
      continue;
    }
    append_repaired(text, bytes);
    bytes.clear();
    if (id != end_of_document) text.append(replacement_character);
  }
  append_repaired(text, bytes);
  return text;
}

std::string ByteTokenizer::token_text(std::int32_t id) {
  if (id == end_of_document) return "<end of document>";
  if (id < 0 || id > end_of_document) return fmt::format("<{}>", id);
  switch (id) {
    case '\n':
      return R"('\n')";
    case '\r':
      return R"('\r')";
    case '\t':
      return R"('\t')";
    case '\\':
      return R"('\\')";
    case '\'':
      return R"('\'')";
    default:
      break;
  }
  if (id >= 0x20 && id < 0x7f) return fmt::format("'{}'", static_cast<char>(id));
  return fmt::format(R"('\x{:02x}')", id);
}

}  // namespace layerstream::io
