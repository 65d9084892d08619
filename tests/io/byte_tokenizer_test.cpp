#include "io/byte_tokenizer.hpp"

#include <gtest/gtest.h>

#include "io/utf8.hpp"

namespace layerstream::io {
namespace {

TEST(ByteTokenizer, AnyBytesSurviveAsIds) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes.push_back(static_cast<char>(i));
  const std::vector<std::int32_t> ids = ByteTokenizer::encode(bytes);
  ASSERT_EQ(ids.size(), 256u);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<std::size_t>(i)], i);
}

TEST(ByteTokenizer, DecodeInvertsEncodeForValidText) {
  const std::string text = "plain\r\n\tgr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80 end";
  EXPECT_EQ(ByteTokenizer::decode(ByteTokenizer::encode(text)), text);
}

TEST(ByteTokenizer, DecodeReplacesWhatIsNotTextAndOmitsDocumentEnds) {
  const std::string replacement = "\xef\xbf\xbd";
  EXPECT_EQ(ByteTokenizer::decode(std::vector<std::int32_t>{'a', 256, 'b'}), "ab");
  EXPECT_EQ(ByteTokenizer::decode(std::vector<std::int32_t>{'a', -1, 257, 100000, 'b'}),
            "a" + replacement + replacement + replacement + "b");
  EXPECT_EQ(ByteTokenizer::decode(std::vector<std::int32_t>{0xff, 'x', 0xe2, 0x82}),
            replacement + "x" + replacement);
  // A document end within a character: both halves are ill-formed.
  EXPECT_EQ(ByteTokenizer::decode(std::vector<std::int32_t>{0xc3, 256, 0xbc}), replacement + replacement);
}

TEST(ByteTokenizer, TokenTextIsPrintableAscii) {
  EXPECT_EQ(ByteTokenizer::token_text('a'), "'a'");
  EXPECT_EQ(ByteTokenizer::token_text('\n'), R"('\n')");
  EXPECT_EQ(ByteTokenizer::token_text('\''), R"('\'')");
  EXPECT_EQ(ByteTokenizer::token_text(0xc3), R"('\xc3')");
  EXPECT_EQ(ByteTokenizer::token_text(0), R"('\x00')");
  EXPECT_EQ(ByteTokenizer::token_text(256), "<end of document>");
  EXPECT_EQ(ByteTokenizer::token_text(300), "<300>");
  for (std::int32_t id = 0; id <= 256; ++id) {
    for (const char c : ByteTokenizer::token_text(id)) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << id;
  }
}

// Encodes by the definition of UTF-8 (RFC 3629, section 3), surrogates and beyond included.
std::string encode_code_point(std::uint32_t c) {
  const auto byte = [](std::uint32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xc0 | c >> 6), byte(0x80 | (c & 0x3f))};
  if (c < 0x10000) return {byte(0xe0 | c >> 12), byte(0x80 | (c >> 6 & 0x3f)), byte(0x80 | (c & 0x3f))};
  return {byte(0xf0 | c >> 18), byte(0x80 | (c >> 12 & 0x3f)), byte(0x80 | (c >> 6 & 0x3f)),
          byte(0x80 | (c & 0x3f))};
}

TEST(Utf8, ExactlyTheScalarValuesAreWellFormed) {
  for (std::uint32_t c = 0; c < 0x120000; ++c) {
    const bool is_scalar = c < 0x110000 && !(c >= 0xd800 && c < 0xe000);
    ASSERT_EQ(!find_utf8_fault(encode_code_point(c)), is_scalar) << std::hex << c;
  }
}

TEST(Utf8, EveryTwoByteSequenceIsJudgedByTheDefinition) {
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      const std::string text{static_cast<char>(a), static_cast<char>(b)};
      const bool valid = (a < 0x80 && b < 0x80) || (a >= 0xc2 && a <= 0xdf && (b & 0xc0) == 0x80);
      ASSERT_EQ(!find_utf8_fault(text), valid) << a << ' ' << b;
    }
  }
}

TEST(Utf8, FaultsHaveOffsetLengthAndCause) {
  struct Case {
    std::string text;
    std::size_t offset;
    std::size_t length;
    std::string cause;
  };
  const std::string long_ascii(21, 'x');  // past the word-wise scan
  const std::vector<Case> cases{
      {long_ascii + "\x80", 21, 1, "continues a character that was not begun"},
      {"ab\xc0\xaf", 2, 1, "overlong"},
      {"\xe0\x80\x80", 0, 1, "overlong"},
      {"\xf0\x80\x80\x80", 0, 1, "overlong"},
      {"\xed\xa0\x80", 0, 1, "surrogate"},
      {"\xf4\x90\x80\x80", 0, 1, "beyond U+10FFFF"},
      {"\xf5", 0, 1, "0xf5 never occurs"},
      {"\xff", 0, 1, "0xff never occurs"},
      {"\xc3(", 0, 1, "0xc3 is followed by 0x28"},
      {"\xe2\x82(", 0, 2, "cut short by 0x28"},
      {"\xf0\x9f\x98", 0, 3, "ends inside a character"},
  };
  for (const Case& c : cases) {
    const auto fault = find_utf8_fault(c.text);
    ASSERT_TRUE(fault) << c.cause;
    EXPECT_EQ(fault->offset, c.offset) << c.cause;
    EXPECT_EQ(fault->length, c.length) << c.cause;
    EXPECT_NE(fault->cause.find(c.cause), std::string::npos) << fault->cause << " lacks " << c.cause;
  }
}

}  // namespace
}  // namespace layerstream::io
