#include "io/file_sink.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "data_files.hpp"
#include "io/file_source.hpp"

namespace layerstream::io {
namespace {

using testing::DataDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Pair;

/// Takes one byte at a time, and is interrupted before each.
class SlowFileSystem : public FileSystem {
 public:
  ssize_t write(int fd, const void* data, std::size_t) override {
    if (std::exchange(interrupted_, !interrupted_)) return FileSystem::write(fd, data, 1);
    errno = EINTR;
    return -1;
  }

 private:
  bool interrupted_ = false;
};

/// Swallows the bytes and notes which ranges are written back.
class SwallowingFileSystem : public FileSystem {
 public:
  int write_back_error = 0;
  std::vector<std::pair<off_t, off_t>> waits;  // begin, bytes

  ssize_t write(int, const void*, std::size_t bytes) override { return static_cast<ssize_t>(bytes); }
  int sync_file_range(int, off_t offset, off_t bytes, unsigned flags) override {
    errno = write_back_error;
    if (write_back_error != 0) return -1;
    if ((flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0) waits.emplace_back(offset, bytes);
    return 0;
  }
};

TEST(FileSink, ShortAndInterruptedWritesAreCompleted) {
  const DataDirectory directory;
  FileSink sink(std::make_shared<SlowFileSystem>(), directory.path("f"));
  sink.append("hello ");
  sink.append("world");
  sink.finish();
  EXPECT_EQ(read_text(directory.path("f")), "hello world");
  EXPECT_EQ(sink.bytes(), 11u);
}

TEST(FileSink, HashIsXxh3OfTheContentWhateverThePieces) {
  const DataDirectory directory;
  FileSink sink(std::make_shared<FileSystem>(), directory.path("f"));
  for (const char c : std::string("hello world")) sink.append(std::string_view(&c, 1));
  sink.finish();
  // printf 'hello world' | xxh3sum
  EXPECT_EQ(sink.hash().hex(), "d447b1ea40e6988b");
  EXPECT_EQ(hash_file(directory.path("f")), "d447b1ea40e6988b");
}

TEST(FileSink, LongFilesAreWrittenBackWindowByWindow) {
  const DataDirectory directory;
  const auto files = std::make_shared<SwallowingFileSystem>();
  FileSink sink(files, directory.path("f"));
  const std::vector<std::byte> piece(std::size_t{48} << 20);
  for (int i = 0; i < 5; ++i) sink.append(piece);  // 240 MiB: three windows of 64 MiB are full
  const off_t window = off_t{64} << 20;
  EXPECT_THAT(files->waits, ElementsAre(Pair(0, window), Pair(window, window)));
}

TEST(FileSink, WriteBackErrorIsNotLost) {
  const DataDirectory directory;
  const auto files = std::make_shared<SwallowingFileSystem>();
  files->write_back_error = EIO;
  FileSink sink(files, directory.path("f"));
  const std::vector<std::byte> piece(std::size_t{64} << 20);
  EXPECT_THAT(
      message_of<FileError>([&] { sink.append(piece); }),
      HasSubstr(directory.path("f") + ": writing back bytes [0, 67108864) failed: Input/output error"));
}

TEST(FileSink, FileSystemWithoutWriteBackControlIsFine) {
  const DataDirectory directory;
  const auto files = std::make_shared<SwallowingFileSystem>();
  files->write_back_error = ENOSYS;
  FileSink sink(files, directory.path("f"));
  sink.append(std::vector<std::byte>(std::size_t{65} << 20));
  sink.finish();
  EXPECT_TRUE(sink.finished());
}

TEST(FileSink, DirectoryThatCannotBeWrittenIsNamed) {
  const DataDirectory directory;
  EXPECT_EQ(message_of<FileError>([&] { FileSink(std::make_shared<FileSystem>(), directory.path("no/f")); }),
            directory.path("no/f") + ": creating the file failed: No such file or directory");
}

}  // namespace
}  // namespace layerstream::io
