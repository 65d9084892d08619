// `dataset:` through the program, with a shell script in the place of Python. How it goes with the real one
// is tests/tools/train_dataset_test.py.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/safetensors.hpp"
#include "program_files.hpp"
#include "tests/support/fake_python.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class DatasetRun : public ::testing::Test {
 protected:
  DatasetRun() {
    write_text(files_.path("chats.jsonl"), "{}\n");
    RunConfig run = files_.config();
    run.train_file.clear();
    run.dataset = {files_.path("chats.jsonl").string()};
    run.dataset_dir = files_.path("data").string();
    run.tokenizer_name = files_.path("model").string();
    run.python = files_.path("python").string();
    run.max_steps = 1;
    files_.write_config(run);
    write_shard();
  }

  /// 640 tokens in 20 documents, the first half of each a prompt.
  void write_shard() {
    std::vector<std::int32_t> ids(640);
    std::vector<std::uint8_t> mask(640);
    std::vector<std::int64_t> offsets;
    for (std::int32_t i = 0; i < 640; ++i) {
      ids[static_cast<std::size_t>(i)] = i % 26 + 'a';
      mask[static_cast<std::size_t>(i)] = i % 32 >= 16 ? 1 : 0;
    }
    for (std::int64_t offset = 0; offset <= 640; offset += 32) offsets.push_back(offset);
    fs::create_directories(files_.path("shards"));
    io::SafetensorsWriter writer(std::make_shared<io::FileSystem>(), shard(),
                                 {{"input_ids", DType::i32, {640}},
                                  {"target_mask", DType::u8, {640}},
                                  {"document_offsets", DType::i64, {21}}});
    writer.append(std::as_bytes(std::span(ids)));
    writer.append(std::as_bytes(std::span(mask)));
    writer.append(std::as_bytes(std::span(offsets)));
    writer.finish();
  }
  fs::path shard() const { return files_.path("shards/tokens.safetensors"); }
  FakePython python(const std::string& script) const { return {files_.path("."), script}; }
  FakePython python_that_prepares() const {
    return python("echo 'chats.jsonl: 20 records' >&2\necho '" + shard().string() + "'");
  }

  ProgramFiles files_;
};

TEST_F(DatasetRun, IsPreparedReadAndTrained) {
  const FakePython python = python_that_prepares();
  const ChildResult result = files_.run("train");
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("data: chats.jsonl: 20 records\n"),
                                HasSubstr("1 token shards, 20 documents"), HasSubstr("step 1/1")));
  EXPECT_THAT(python.arguments(), Contains("--model-config=" + files_.path("model/config.json").string()));
}

TEST_F(DatasetRun, HeldOutDataIsPreparedAsWell) {
  const FakePython python = python_that_prepares();
  const std::string held_out = files_.path("held.jsonl").string();
  write_text(held_out, "{}\n");
  const ChildResult result =
      files_.run("train", {"eval_dataset=" + held_out, "eval_strategy=steps", "eval_steps=1"});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("held-out data: chats.jsonl: 20 records\n"), HasSubstr("eval loss")));
  EXPECT_THAT(python.arguments(), Contains(held_out));
}

TEST_F(DatasetRun, WhatTheToolRefusesIsRefusedBeforeAnythingIsMade) {
  const FakePython fake = python("echo 'prepare_data: chats.jsonl:1: no text' >&2\nexit 1");
  for (const std::string command : {"train", "inspect-data"}) {
    const ChildResult result = files_.run(command);
    EXPECT_EQ(result.exit_code, exit_code::refused);
    EXPECT_THAT(
        result.err,
        HasSubstr("layerstream: prepare_data: chats.jsonl:1: no text\nThe command, to run it by hand: "));
  }
  EXPECT_FALSE(fs::exists(files_.path("out")));
}

TEST_F(DatasetRun, WithoutAPythonTheRemedyIsNamed) {
  const ChildResult result = files_.run("train");
  EXPECT_EQ(result.exit_code, exit_code::refused);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("layerstream: python: "), HasSubstr("pip install tokenizers jinja2")));
}

TEST_F(DatasetRun, WithoutDataBothKeysAreNeeded) {
  const ChildResult result = files_.run("train", {"dataset=[]", "tokenizer_name=\"\"", "dataset_dir=data"});
  EXPECT_EQ(result.exit_code, exit_code::refused);
  EXPECT_THAT(result.err, HasSubstr("`train_file` is needed to train"));
}

TEST_F(DatasetRun, PlanPreparesNothing) {
  const FakePython python = python_that_prepares();
  const ChildResult result = files_.run("plan");
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("dataset is not counted"), HasSubstr("host")));
  EXPECT_THAT(python.arguments(), IsEmpty());
}

TEST_F(DatasetRun, InspectDataShowsTextsThatLieBesideTheShards) {
  const FakePython python = python_that_prepares();
  std::string texts = "[";
  for (int id = 0; id < 260; ++id) texts += fmt::format("{}\" w{}\"", id == 0 ? "" : ",", id);
  write_text(files_.path("shards/.tokens.json"), texts + "]");
  const ChildResult result = files_.run("inspect-data");
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  // Token 15 predicts the answer's first, and only targets are predicted.
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("      15       15      112  ' w112'              no      113 ' w113'\n"),
                    HasSubstr("      16       16      113  ' w113'              yes     114 ' w114'\n"),
                    HasSubstr("       0        0       97  ' w97'               no      -\n")));
}

TEST_F(DatasetRun, TokenShardsAreReadAsTheyAre) {
  const ChildResult result = files_.run("train", {"dataset=" + files_.path("shards").string()});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("token shards already, read as they are"), HasSubstr("step 1/1")));
}

/// A script that says its process id, then sleeps; what it does at SIGTERM comes first.
std::string sleeping(const std::string& at_sigterm) {
  return at_sigterm + "\necho \"process $$\" >&2\nwhile :; do sleep 0.1; done";
}

pid_t process_in(const std::string& log) {
  const std::size_t at = log.find("process ");
  return at == std::string::npos ? -1 : std::stoi(log.substr(at + 8));
}

class DatasetSignals : public DatasetRun, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Slurm, DatasetSignals, ::testing::Values(SIGTERM, SIGUSR1, SIGINT));

TEST_P(DatasetSignals, WhilePreparingTheChildIsStoppedAndNothingIsMade) {
  const FakePython fake = python(sleeping("trap 'touch \"$0.stopped\"; exit 1' TERM"));
  for (const std::string command : {"train", "inspect-data"}) {
    Child child(files_.arguments(command));
    ASSERT_TRUE(child.wait_for("process "));
    child.signal(GetParam());
    const ChildResult result = child.finish();
    EXPECT_EQ(result.exit_code, exit_code::interrupted) << result.err;
    EXPECT_THAT(result.err, HasSubstr("while preparing the training data"));
    EXPECT_NE(::kill(process_in(result.err), 0), 0);
    EXPECT_TRUE(fs::remove(files_.path("python.stopped")));
  }
  EXPECT_FALSE(fs::exists(files_.path("out")));
}

TEST_F(DatasetRun, AChildThatDoesNotStopIsKilled) {
  const FakePython fake = python(sleeping("trap '' TERM"));
  Child child(files_.arguments("train"));
  ASSERT_TRUE(child.wait_for("process "));
  child.signal(SIGTERM);
  const ChildResult result = child.finish();
  EXPECT_EQ(result.exit_code, exit_code::interrupted) << result.err;
  EXPECT_NE(::kill(process_in(result.err), 0), 0);
}

}  // namespace
}  // namespace layerstream::test
