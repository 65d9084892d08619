#include "io/text_source.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "core/error.hpp"
#include "data_files.hpp"
#include "io/byte_tokenizer.hpp"
#include "io/input_files.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

struct ReadResult {
  TokenStore store{ByteTokenizer::vocab_size};
  DatasetReport report;

  std::string text(std::size_t document) const {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(store.documents()[document].length));
    store.copy_tokens(store.documents()[document].begin, ids);
    EXPECT_EQ(ids.back(), ByteTokenizer::end_of_document);
    return ByteTokenizer::decode(ids);
  }
};

ReadResult read_all(const std::vector<std::string>& inputs, OnBadLine on_bad_line = OnBadLine::error) {
  ReadResult result;
  for (const InputFile& file : find_input_files(inputs, result.report)) {
    read_text_file(file, on_bad_line, result.store, result.report);
  }
  return result;
}

TEST(TextSource, FileIsOneDocumentWithItsBytesAndAnEnd) {
  DataDirectory data;
  const std::string text = "one\r\ntwo\n\n\xe2\x82\xac without newline";
  const ReadResult result = read_all({data.write("a.txt", text)});
  ASSERT_EQ(result.store.documents().size(), 1u);
  EXPECT_EQ(result.text(0), text);  // CRLF kept
  EXPECT_EQ(result.store.num_tokens(), static_cast<std::int64_t>(text.size()) + 1);
  EXPECT_EQ(result.report.text_files, 1);
}

TEST(TextSource, DirectoriesAreWalkedInPathOrderAndInputsInTheirOwn) {
  DataDirectory data;
  data.write("d/b.txt", "b");
  data.write("d/a/z.md", "az");
  data.write("d/a/nested/y", "anesty");
  data.write("d/c", "c");
  const std::string first = data.write("zz.txt", "first");
  const ReadResult result = read_all({first, data.path("d")});
  ASSERT_EQ(result.store.documents().size(), 5u);
  EXPECT_EQ(result.text(0), "first");
  EXPECT_EQ(result.text(1), "anesty");
  EXPECT_EQ(result.text(2), "az");
  EXPECT_EQ(result.text(3), "b");
  EXPECT_EQ(result.text(4), "c");
}

TEST(TextSource, HiddenBinaryEmptyAndSpecialFilesOfDirectoriesAreSkippedAndCounted) {
  DataDirectory data;
  data.write("d/text", "kept");
  data.write("d/.hidden", "no");
  data.write("d/.git/config", "no");
  data.write("d/binary", std::string("ab\nc\0d", 6));
  data.write("d/empty", "");
  ASSERT_EQ(mkfifo(data.path("d/fifo").c_str(), 0600), 0);
  const ReadResult result = read_all({data.path("d")});
  ASSERT_EQ(result.store.documents().size(), 1u);
  EXPECT_EQ(result.text(0), "kept");
  EXPECT_EQ(result.report.hidden.count, 2);
  EXPECT_THAT(result.report.hidden.first, ElementsAre(data.path("d/.git"), data.path("d/.hidden")));
  EXPECT_EQ(result.report.binary_files.count, 1);
  EXPECT_THAT(result.report.binary_files.first, ElementsAre(data.path("d/binary") + ":2:2"));
  EXPECT_THAT(result.report.empty_files.first, ElementsAre(data.path("d/empty")));
  EXPECT_THAT(result.report.special_files.first, ElementsAre(data.path("d/fifo")));
  const std::string text = result.report.to_text();
  for (const char* part : {"hidden", "NUL", "empty files", "special", "d/.hidden", "d/binary:2:2"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(TextSource, HiddenOrBinaryFileNamedByTheUserIsNotSkippedSilently) {
  DataDirectory data;
  EXPECT_EQ(read_all({data.write(".hidden.txt", "kept")}).store.documents().size(), 1u);
  const std::string binary = data.write("x.bin", std::string("a\0", 2));
  EXPECT_THAT(message_of<FileError>([&] { read_all({binary}); }),
              AllOf(HasSubstr(binary + ":1:2"), HasSubstr("NUL")));
  EXPECT_EQ(read_all({binary}, OnBadLine::skip).report.binary_files.count, 1);
}

TEST(TextSource, FaultyLineIsRefusedWithFileLineByteAndCause) {
  DataDirectory data;
  const std::string path = data.write("bad.txt",
                                      "fine\r\ngr\xc3\xbc\xc3\x9f\nab\xff"
                                      "cd\nrest\xfe");
  const std::string message = message_of<FileError>([&] { read_all({path}); });
  EXPECT_THAT(message, AllOf(HasSubstr(path + ":3:3: "), HasSubstr("0xff"), HasSubstr("on_bad_line: skip")));
}

TEST(TextSource, CharacterCutByTheEndOfAFileIsRefusedAtItsFirstByte) {
  DataDirectory data;
  const std::string path = data.write("cut.txt", "ab\nc\xe2\x82");
  EXPECT_THAT(message_of<FileError>([&] { read_all({path}); }),
              AllOf(HasSubstr(path + ":2:2: "), HasSubstr("ends inside a character")));
}

TEST(TextSource, FaultyLinesAreDroppedWholeAndTheFirstPlacesRemembered) {
  DataDirectory data;
  std::string text = "\xff first\nkept 1\ntwo faults \x80 and \x81\nkept 2\n\nlast \xc3";
  const ReadResult result = read_all({data.write("bad.txt", text)}, OnBadLine::skip);
  EXPECT_EQ(result.text(0), "kept 1\nkept 2\n\n");
  EXPECT_EQ(result.report.bad_lines.count, 3);
  ASSERT_EQ(result.report.bad_lines.first.size(), 3u);
  EXPECT_THAT(result.report.bad_lines.first[0], HasSubstr("bad.txt:1:1: "));
  EXPECT_THAT(result.report.bad_lines.first[1], HasSubstr("bad.txt:3:12: "));
  EXPECT_THAT(result.report.bad_lines.first[2], HasSubstr("bad.txt:6:6: "));
  EXPECT_THAT(result.report.to_text(), HasSubstr("bad.txt:3:12"));
}

TEST(TextSource, OnlyTheFirstFewPlacesAreKeptAndTheRestCounted) {
  DataDirectory data;
  std::string text;
  for (int i = 0; i < 100; ++i) text += "\xff\n";
  const ReadResult result = read_all({data.write("bad.txt", text + "kept")}, OnBadLine::skip);
  EXPECT_EQ(result.text(0), "kept");
  EXPECT_EQ(result.report.bad_lines.count, 100);
  EXPECT_EQ(result.report.bad_lines.first.size(), Places::remembered);
  EXPECT_THAT(result.report.to_text(), HasSubstr("and 95 more"));
}

TEST(TextSource, FileOfWhichNoLineIsLeftIsAnEmptyDocument) {
  DataDirectory data;
  const ReadResult result = read_all({data.write("bad.txt", "\xff\n\xfe")}, OnBadLine::skip);
  EXPECT_TRUE(result.store.documents().empty());
  EXPECT_EQ(result.store.num_tokens(), 0);
  EXPECT_EQ(result.report.empty_documents.count, 1);
}

TEST(TextSource, GitLfsPointerIsNamedAsSuch) {
  DataDirectory data;
  const std::string path =
      data.write("d/corpus.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n");
  EXPECT_THAT(message_of<FileError>([&] { read_all({data.path("d")}); }),
              AllOf(HasSubstr(path), HasSubstr("git lfs pull")));
}

TEST(InputFiles, MissingPathIsNamed) {
  DataDirectory data;
  EXPECT_THAT(message_of<FileError>([&] { read_all({data.path("nowhere.txt")}); }),
              AllOf(HasSubstr("nowhere.txt"), HasSubstr("does not exist")));
  EXPECT_THAT(message_of<ConfigError>([&] { read_all({}); }), HasSubstr("train_file"));
  EXPECT_THAT(message_of<ConfigError>([&] { read_all({""}); }), HasSubstr("train_file"));
}

TEST(InputFiles, FileReachedTwiceIsRefusedByBothNames) {
  DataDirectory data;
  const std::string file = data.write("d/a.txt", "a");
  const auto refused = [&](const std::vector<std::string>& inputs) {
    return message_of<FileError>([&] { read_all(inputs); });
  };
  EXPECT_THAT(refused({file, file}), HasSubstr("the same as"));
  EXPECT_THAT(refused({data.path("d"), file}), AllOf(HasSubstr(file), HasSubstr("num_train_epochs")));
  EXPECT_THAT(refused({data.path("d"), data.path("d/../d")}), HasSubstr("d/../d"));
}

TEST(InputFiles, LinksAreFollowedAndCyclesAndDeadLinksRefused) {
  DataDirectory data;
  data.write("blobs/1234", "linked");
  std::filesystem::create_directories(data.path("snapshot"));
  std::filesystem::create_symlink(data.path("blobs/1234"), data.path("snapshot/a.txt"));
  EXPECT_EQ(read_all({data.path("snapshot")}).text(0), "linked");

  std::filesystem::create_directory_symlink(data.path("snapshot"), data.path("snapshot/loop"));
  EXPECT_THAT(message_of<FileError>([&] { read_all({data.path("snapshot")}); }), HasSubstr("snapshot/loop"));

  std::filesystem::create_symlink(data.path("gone"), data.path("blobs/dead"));
  EXPECT_THAT(message_of<FileError>([&] { read_all({data.path("blobs")}); }),
              AllOf(HasSubstr("blobs/dead"), HasSubstr("link to nothing")));
  EXPECT_THAT(message_of<FileError>([&] { read_all({data.path("blobs/dead")}); }),
              HasSubstr("link to nothing"));
}

TEST(TextSource, FileThatVanishedIsNamedWithTheReason) {
  DataDirectory data;
  const std::string path = data.write("gone.txt", "a");
  ReadResult result;
  const std::vector<InputFile> files = find_input_files({path}, result.report);
  std::filesystem::remove(path);
  EXPECT_THAT(message_of<FileError>(
                  [&] { read_text_file(files.at(0), OnBadLine::error, result.store, result.report); }),
              AllOf(HasSubstr(path), HasSubstr("No such file")));
}

}  // namespace
}  // namespace layerstream::io
