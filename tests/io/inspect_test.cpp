#include "io/inspect.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data_files.hpp"
#include "io/byte_tokenizer.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using testing::document_offsets;
using ::testing::HasSubstr;
using testing::input_ids;
using ::testing::Not;
using testing::safetensors_bytes;
using testing::target_mask;

/// The text from the line that begins with `first` on.
std::string text_from(const std::string& text, const std::string& first) {
  const std::size_t begin = text.find("\n" + first);
  return begin == std::string::npos ? "" : text.substr(begin + 1);
}

TEST(Inspect, ShowsEachTokenWithTextPositionMaskAndDocument) {
  DataDirectory data;
  const std::string a = data.write("a", "h\n");
  const std::string b = data.write("b", "\xc3\xbc");
  const Dataset dataset =
      Dataset::load({.inputs = {a, b}, .vocab_size = ByteTokenizer::vocab_size, .cutoff_len = 16});
  EXPECT_EQ(text_from(inspect(dataset, {}), "row 0"),
            "row 0: 6 tokens, 4 targets, 2 pieces\n"
            "   token position       id  text                 target  predicts\n"
            "-- " +
                a +
                " (3 tokens)\n"
                "       0        0      104  'h'                  no      10 '\\n'\n"
                "       1        1       10  '\\n'                 yes     256 <end of document>\n"
                "       2        2      256  <end of document>    yes     -\n"
                "-- " +
                b +
                " (3 tokens)\n"
                "       3        0      195  '\\xc3'               no      188 '\\xbc'\n"
                "       4        1      188  '\\xbc'               yes     256 <end of document>\n"
                "       5        2      256  <end of document>    yes     -\n");
}

TEST(Inspect, ShowsWhichTokensOfAShardAreTrainedOn) {
  DataDirectory data;
  const std::string path = data.write(
      "s.safetensors", safetensors_bytes({input_ids({500, 501, 502, 503, 504, 505}),
                                          document_offsets({0, 4, 6}), target_mask({1, 0, 1, 1, 0, 1})}));
  const Dataset dataset = Dataset::load({.inputs = {path}, .vocab_size = 1000, .cutoff_len = 16});
  InspectOptions options;
  options.token_text = [](const std::string&, std::int32_t id) { return id == 501 ? "<user>\n" : "word"; };
  EXPECT_EQ(text_from(inspect(dataset, options), "row 0"),
            "row 0: 6 tokens, 3 targets, 2 pieces\n"
            "   token position       id  text                 target  predicts\n"
            "-- " +
                path +
                ": document 0 (4 tokens)\n"
                "       0        0      500  word                 no      -\n"
                "       1        1      501  <user>\\n             no      502 word\n"
                "       2        2      502  word                 yes     503 word\n"
                "       3        3      503  word                 yes     -\n"
                "-- " +
                path +
                ": document 1 (2 tokens)\n"
                "       4        0      504  word                 no      505 word\n"
                "       5        1      505  word                 yes     -\n");
  // Ids of an unknown tokenizer are not shown as if they were bytes.
  EXPECT_THAT(inspect(dataset, {}), AllOf(HasSubstr("504"), Not(HasSubstr("<504>")), Not(HasSubstr("word"))));
}

TEST(Inspect, BeginsWithTheReportAndStopsAtTheAskedRowsAndTokens) {
  DataDirectory data;
  const Dataset dataset = Dataset::load({.inputs = {data.write("a", std::string(99, 'x'))},
                                         .vocab_size = ByteTokenizer::vocab_size,
                                         .cutoff_len = 10});
  InspectOptions options;
  options.num_rows = 3;
  options.tokens_per_row = 4;
  const std::string text = inspect(dataset, options);
  EXPECT_TRUE(text.starts_with(dataset.report().to_text()));
  EXPECT_THAT(text, AllOf(HasSubstr("row 2:"), Not(HasSubstr("row 3:")), HasSubstr("and 6 more tokens"),
                          HasSubstr("a: tokens 20 to 29 (10 tokens)")));
  options.num_rows = 100;
  EXPECT_THAT(inspect(dataset, options), AllOf(HasSubstr("row 9:"), Not(HasSubstr("row 10:"))));
}

}  // namespace
}  // namespace layerstream::io
