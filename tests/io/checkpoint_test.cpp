#include "io/checkpoint.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "checkpoint_files.hpp"
#include "core/error.hpp"
#include "data_files.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::check_checkpoint;
using testing::DataDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::names_in;
using testing::save_checkpoint;
using ::testing::StartsWith;

class Checkpoints : public ::testing::Test {
 protected:
  std::string dir(const std::string& name) { return directory_.path(name); }
  std::vector<std::int64_t> steps() {
    std::vector<std::int64_t> steps;
    for (const FoundCheckpoint& found : find_checkpoints(directory_.root())) steps.push_back(found.step);
    return steps;
  }
  void flip(const std::string& file, std::size_t at) {
    std::string bytes = read_text(file);
    bytes.at(at) = static_cast<char>(bytes[at] ^ 1);
    std::ofstream(file, std::ios::binary) << bytes;
  }
  DataDirectory directory_{testing::fast_directory()};
};

TEST_F(Checkpoints, WhatIsWrittenIsReadBack) {
  EXPECT_EQ(save_checkpoint(dir("out/deep"), 7, 1), dir("out/deep/checkpoint-7"));
  EXPECT_EQ(names_in(dir("out/deep")), "checkpoint-7");
  EXPECT_EQ(names_in(dir("out/deep/checkpoint-7")),
            "manifest.json model.safetensors optimizer.safetensors state.json");
  EXPECT_EQ(check_checkpoint(dir("out/deep/checkpoint-7")), 1);
  const CheckpointReader reader(dir("out/deep/checkpoint-7"));
  EXPECT_EQ(reader.step(), 7);
  EXPECT_TRUE(reader.has("state.json"));
  EXPECT_EQ(message_of<FileError>([&] { reader.text("rng.json"); }),
            dir("out/deep/checkpoint-7") + ": the checkpoint has no file \"rng.json\"");
}

TEST_F(Checkpoints, WithoutCommitNothingIsLeft) {
  {
    CheckpointWriter writer(directory_.root(), 3);
    writer.text("state.json", "{}");
    writer.safetensors("model.safetensors", {{"w", DType::f32, {4}}});
    EXPECT_EQ(names_in(directory_.root()), "checkpoint-3.tmp");
  }
  EXPECT_EQ(names_in(directory_.root()), "");
}

TEST_F(Checkpoints, CommitOfAnUnfinishedFileIsABrokenContract) {
  CheckpointWriter writer(directory_.root(), 3);
  writer.safetensors("model.safetensors", {{"w", DType::f32, {4}}});
  EXPECT_THAT(message_of<ContractError>([&] { writer.commit(); }),
              HasSubstr("model.safetensors is not finished"));
}

TEST_F(Checkpoints, NamesThatLeaveTheDirectoryOrRepeatAreRefused) {
  CheckpointWriter writer(directory_.root(), 3);
  writer.text("a", "");
  for (const char* name : {"../a", "b/c", "", "manifest.json", "a"})
    EXPECT_THROW(writer.text(name, ""), ContractError);
}

TEST_F(Checkpoints, StaleTemporaryDirectoriesOfAnyStepAreRemoved) {
  directory_.write("checkpoint-3.tmp/sub/x", "stale");
  directory_.write("checkpoint-999.tmp/y", "stale");
  save_checkpoint(directory_.root(), 3, 1);
  EXPECT_EQ(names_in(directory_.root()), "checkpoint-3");
}

TEST_F(Checkpoints, OthersFilesInTheOutputDirectoryAreLeftAlone) {
  for (const char* name : {"checkpoint-best.tmp/x", "checkpoint-03.tmp/x", "checkpoint-1/trainer_state.json",
                           "notes.tmp", "xcheckpoint-3/x"}) {
    directory_.write(name, "mine");
  }
  save_checkpoint(directory_.root(), 2, 1);
  save_checkpoint(directory_.root(), 3, 1);
  prune(directory_.root(), {.limit = 1});
  EXPECT_EQ(names_in(directory_.root()),
            "checkpoint-03.tmp checkpoint-1 checkpoint-3 checkpoint-best.tmp notes.tmp xcheckpoint-3");
}

TEST_F(Checkpoints, CheckpointOfTheSameStepIsReplaced) {
  save_checkpoint(directory_.root(), 3, 1);
  directory_.write("checkpoint-3/extra", "of the old one");
  save_checkpoint(directory_.root(), 3, 2);
  EXPECT_EQ(names_in(directory_.root()), "checkpoint-3");
  EXPECT_EQ(check_checkpoint(dir("checkpoint-3")), 2);
  EXPECT_FALSE(std::filesystem::exists(dir("checkpoint-3/extra")));
}

TEST_F(Checkpoints, CompleteOnesAreFoundByStepAndOthersPassedOverWithTheReason) {
  for (const int step : {100, 9, 20}) save_checkpoint(directory_.root(), step, step);
  directory_.write("checkpoint-50/model.safetensors", "no manifest");
  save_checkpoint(directory_.root(), 60, 0);
  std::filesystem::resize_file(dir("checkpoint-60/model.safetensors"), 10);
  std::filesystem::rename(save_checkpoint(directory_.root(), 70, 0), dir("checkpoint-71"));
  std::vector<std::string> passed_over;
  const std::vector<FoundCheckpoint> found = find_checkpoints(directory_.root(), &passed_over);
  EXPECT_THAT(steps(), ElementsAre(9, 20, 100));
  EXPECT_EQ(found.at(1).path, dir("checkpoint-20"));
  const CheckpointReader reader(found.at(1).path);
  std::uint64_t bytes = 0;
  for (const CheckpointFile& file : reader.files()) bytes += file.bytes;
  EXPECT_EQ(found.at(1).bytes, bytes);
  EXPECT_GT(bytes, 3000u);
  EXPECT_THAT(passed_over, ElementsAre(HasSubstr("checkpoint-50/manifest.json: is absent"),
                                       HasSubstr("checkpoint-60/model.safetensors: has 10 bytes"),
                                       HasSubstr("checkpoint-71: its manifest says step 70")));
  EXPECT_EQ(newest_complete(directory_.root()).value().step, 100);
}

TEST_F(Checkpoints, AbsentOutputDirectoryHasNone) {
  EXPECT_TRUE(find_checkpoints(dir("none")).empty());
  EXPECT_FALSE(newest_complete(dir("none")).has_value());
}

TEST_F(Checkpoints, AbsentCheckpointAndAbsentFileAreNamed) {
  EXPECT_EQ(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-1")); }),
            dir("checkpoint-1") + ": no such checkpoint directory");
  save_checkpoint(directory_.root(), 3, 1);
  std::filesystem::remove(dir("checkpoint-3/optimizer.safetensors"));
  EXPECT_THAT(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-3")); }),
              StartsWith(dir("checkpoint-3/optimizer.safetensors") + ": is absent or unreadable"));
}

TEST_F(Checkpoints, WrongSizeIsFoundWithoutReadingTheData) {
  save_checkpoint(directory_.root(), 3, 1);
  std::ofstream(dir("checkpoint-3/state.json"), std::ios::app) << " ";
  EXPECT_EQ(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-3"), Verify::sizes); }),
            dir("checkpoint-3/state.json") +
                ": has 12 bytes, the checkpoint's manifest says 11; use another checkpoint");
}

TEST_F(Checkpoints, FlippedBitInAnyFileIsFoundByItsHash) {
  save_checkpoint(directory_.root(), 3, 1);
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    const std::string file = dir(std::string("checkpoint-3/") + name);
    const std::size_t size = std::filesystem::file_size(file);
    for (const std::size_t at : {std::size_t{0}, size / 2, size - 1}) {
      flip(file, at);
      EXPECT_NO_THROW(CheckpointReader(dir("checkpoint-3"), Verify::sizes));
      EXPECT_THAT(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-3"), Verify::hashes); }),
                  StartsWith(file + ": its content changed after it was written"));
      flip(file, at);
    }
  }
  EXPECT_EQ(check_checkpoint(dir("checkpoint-3")), 1);
}

TEST_F(Checkpoints, FlippedBitAnywhereInTheManifestIsFound) {
  save_checkpoint(directory_.root(), 3, 1);
  const std::string file = dir("checkpoint-3/manifest.json");
  for (std::size_t at = 0; at < std::filesystem::file_size(file); ++at) {
    flip(file, at);
    EXPECT_THROW(CheckpointReader(dir("checkpoint-3"), Verify::sizes), FileError) << at;
    flip(file, at);
  }
  EXPECT_EQ(check_checkpoint(dir("checkpoint-3")), 1);
}

TEST_F(Checkpoints, ManifestOfANewerVersionOrOfAnotherProgramIsToldApart) {
  save_checkpoint(directory_.root(), 3, 1);
  const std::string file = dir("checkpoint-3/manifest.json");
  directory_.write("checkpoint-3/manifest.json", R"({"format":"layerstream checkpoint","version":2})");
  EXPECT_EQ(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-3")); }),
            file + ": has format version 2, this program reads version 1; use the layerstream that wrote it");
  directory_.write("checkpoint-3/manifest.json", R"({"format":"other","version":1})");
  EXPECT_EQ(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-3")); }),
            file + ": is not the manifest of a layerstream checkpoint");
  directory_.write("checkpoint-3/manifest.json", "[]");
  EXPECT_THAT(message_of<FileError>([&] { CheckpointReader(dir("checkpoint-3")); }),
              StartsWith(file + ": is not the manifest of a layerstream checkpoint"));
}

TEST(CheckpointManifest, FileNameThatLeavesTheDirectoryIsRefused) {
  CheckpointManifest manifest;
  manifest.files.push_back({"../../etc/passwd", 1, "0"});
  EXPECT_EQ(message_of<FileError>([&] { CheckpointManifest::from_json(manifest.to_json(), "m"); }),
            "m: file \"../../etc/passwd\" is not a name in this directory");
}

TEST_F(Checkpoints, PruneKeepsTheNewestOnes) {
  for (const int step : {9, 20, 100, 3}) save_checkpoint(directory_.root(), step, step);
  prune(directory_.root(), {.limit = 0});
  EXPECT_THAT(steps(), ElementsAre(3, 9, 20, 100));
  prune(directory_.root(), {.limit = 2});
  EXPECT_THAT(steps(), ElementsAre(20, 100));
  EXPECT_EQ(names_in(directory_.root()), "checkpoint-100 checkpoint-20");
  prune(directory_.root(), {.limit = 1});
  prune(directory_.root(), {.limit = 1});
  EXPECT_THAT(steps(), ElementsAre(100));
}

TEST_F(Checkpoints, PruneNeverCountsAnIncompleteOneAsTheOneToKeep) {
  save_checkpoint(directory_.root(), 9, 9);
  save_checkpoint(directory_.root(), 20, 20);
  std::filesystem::remove(dir("checkpoint-20/manifest.json"));
  prune(directory_.root(), {.limit = 1});
  EXPECT_EQ(check_checkpoint(dir("checkpoint-9")), 9);
}

TEST_F(Checkpoints, PruneSparesTheOneJustWrittenAfterAResumeFromAnOlderOne) {
  for (const int step : {100, 200, 150}) save_checkpoint(directory_.root(), step, step);
  prune(directory_.root(), {.limit = 1}, 150);
  EXPECT_THAT(steps(), ElementsAre(150, 200));
}

TEST_F(Checkpoints, PruneKeepsTheBestAndTheMajorOnesBesideTheLimit) {
  for (const int step : {10, 20, 30, 40, 50, 60}) save_checkpoint(directory_.root(), step, step);
  prune(directory_.root(), {.limit = 2, .best = 10, .major_steps = 30});
  EXPECT_THAT(steps(), ElementsAre(10, 30, 40, 50, 60));
  prune(directory_.root(), {.limit = 1, .best = 50, .major_steps = 0});
  EXPECT_THAT(steps(), ElementsAre(50, 60));
}

TEST_F(Checkpoints, TheBestOneHasANameThatMoves) {
  for (const int step : {10, 20}) save_checkpoint(directory_.root(), step, step);
  link_best(directory_.root(), 10);
  EXPECT_EQ(check_checkpoint(dir("checkpoint-best")), 10);
  link_best(directory_.root(), 20);
  EXPECT_EQ(check_checkpoint(dir("checkpoint-best")), 20);
  EXPECT_THAT(steps(), ElementsAre(10, 20));
  prune(directory_.root(), {.limit = 1, .best = 20});
  EXPECT_EQ(check_checkpoint(dir("checkpoint-best")), 20);
  link_best(directory_.root(), {});
  EXPECT_EQ(names_in(directory_.root()), "checkpoint-10 checkpoint-20");
  link_best(directory_.root(), {});
  // What somebody has put there is not ours to remove.
  std::filesystem::copy(dir("checkpoint-20"), dir("checkpoint-best"),
                        std::filesystem::copy_options::recursive);
  link_best(directory_.root(), {});
  EXPECT_THAT(message_of<FileError>([&] { link_best(directory_.root(), 20); }),
              HasSubstr("no symbolic link"));
  EXPECT_EQ(check_checkpoint(dir("checkpoint-best")), 20);
}

TEST_F(Checkpoints, RequiredBytesIsTheLimitAndOneMore) {
  const std::string out = directory_.root();
  EXPECT_EQ(required_bytes(out, 1000, {.limit = 2}, 10), 3000u);
  EXPECT_EQ(required_bytes(out, 1000, {.limit = 2}, 2), 2000u);
  EXPECT_EQ(required_bytes(out, 1000, {.limit = 0}, 10), 10'000u);
  EXPECT_EQ(required_bytes(out, 1000, {.limit = 2}, 0), 0u);
  EXPECT_EQ(required_bytes(out, 1000, {.limit = 1'000'000'000}, 10), 10'000u);
}

TEST_F(Checkpoints, RequiredBytesCountsWhatExistingOnesWillRelease) {
  for (const int step : {1, 2}) save_checkpoint(directory_.root(), step, step);
  const std::uint64_t each = find_checkpoints(directory_.root()).at(0).bytes;
  // The third one, then one goes; the third one and the fourth; the limit was lowered.
  EXPECT_EQ(required_bytes(directory_.root(), each, {.limit = 2}, 10), each);
  EXPECT_EQ(required_bytes(directory_.root(), each, {.limit = 3}, 10), 2 * each);
  EXPECT_EQ(required_bytes(directory_.root(), each, {.limit = 1}, 10), each);
  EXPECT_EQ(required_bytes(directory_.root(), 10 * each, {.limit = 1}, 10), 20 * each - 2 * each);
  // The best one stays.
  EXPECT_EQ(required_bytes(directory_.root(), 10 * each, {.limit = 1, .best = 1}, 10), 20 * each - each);
}

/// Notes what becomes durable, and the renames, in order.
class NotingFileSystem : public FileSystem {
 public:
  std::vector<std::string> notes;
  int open(const char* path, int flags, mode_t mode) override {
    const int fd = FileSystem::open(path, flags, mode);
    paths_[fd] = path;
    return fd;
  }
  int fsync(int fd) override {
    notes.push_back("sync " + paths_[fd]);
    return FileSystem::fsync(fd);
  }
  int rename(const char* from, const char* to) override {
    notes.push_back(std::string("rename ") + from + " to " + to);
    return FileSystem::rename(from, to);
  }
  int exchange(const char* a, const char* b) override {
    notes.push_back(std::string("exchange ") + a + " with " + b);
    return FileSystem::exchange(a, b);
  }
  int rmdir(const char* path) override {
    notes.push_back(std::string("remove ") + path);
    return FileSystem::rmdir(path);
  }

 private:
  std::map<int, std::string> paths_;
};

// No test can cut the power; the order of these calls is what survives it.
TEST_F(Checkpoints, FilesThenManifestThenDirectoryAreDurableBeforeTheRenameAndTheRenameBeforeRemovals) {
  const auto files = std::make_shared<NotingFileSystem>();
  const std::string tmp = dir("checkpoint-3.tmp");
  save_checkpoint(directory_.root(), 3, 1, files);
  const std::vector<std::string> written{"sync " + tmp + "/optimizer.safetensors",
                                         "sync " + tmp + "/model.safetensors", "sync " + tmp + "/state.json",
                                         "sync " + tmp + "/manifest.json", "sync " + tmp};
  std::vector<std::string> expected = written;
  expected.push_back("rename " + tmp + " to " + dir("checkpoint-3"));
  expected.push_back("sync " + directory_.root());
  EXPECT_EQ(files->notes, expected);

  files->notes.clear();
  save_checkpoint(directory_.root(), 3, 2, files);
  expected = written;
  expected.push_back("exchange " + tmp + " with " + dir("checkpoint-3"));
  expected.push_back("sync " + directory_.root());
  expected.push_back("remove " + tmp);
  EXPECT_EQ(files->notes, expected);
}

class SmallDisk : public FileSystem {
 public:
  std::string asked;
  int statvfs(const char* path, struct ::statvfs* result) override {
    asked = path;
    *result = {};
    result->f_frsize = 4096;
    result->f_bavail = 256;
    return 0;
  }
};

TEST_F(Checkpoints, SpaceIsCheckedWhereTheDirectoryWillBe) {
  const auto disk = std::make_shared<SmallDisk>();
  EXPECT_NO_THROW(check_space(dir("out/deep"), 1 << 20, disk));
  EXPECT_EQ(disk->asked, directory_.root());
  EXPECT_EQ(
      message_of<ResourceError>([&] { check_space(dir("out"), (1 << 20) + 1, disk); }),
      dir("out") +
          ": checkpoints need 1.00 MiB (1048577 bytes), the file system has 1.00 MiB (1048576 bytes) free; "
          "free space there, choose another output_dir, or lower save_total_limit or the number of saves");
  EXPECT_NO_THROW(check_space(directory_.root(), 1));
}

}  // namespace
}  // namespace layerstream::io
