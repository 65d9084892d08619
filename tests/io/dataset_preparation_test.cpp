#include "io/dataset_preparation.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "core/signals.hpp"
#include "data_files.hpp"
#include "io/token_texts.hpp"
#include "tests/support/fake_python.hpp"

namespace layerstream::io {
namespace {

using test::FakePython;
using ::testing::AllOf;
using ::testing::Contains;
using testing::DataDirectory;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Not;
using ::testing::StartsWith;

class DatasetPreparation : public ::testing::Test {
 protected:
  DatasetPreparation() {
    run_.model_name_or_path = data_.path("model");
    run_.dataset = {data_.write("chats.jsonl", "{}")};
    run_.dataset_dir = data_.path("data");
  }

  /// prepared_inputs with a Python that does `script`.
  std::vector<std::string> prepared(std::string_view script, DataRole role = DataRole::train) {
    python_.emplace(data_.root(), script);
    run_.python = python_->path();
    return prepared_inputs(run_, role, "model/config.json",
                           {.say = [this](std::string_view line) { said_.emplace_back(line); }});
  }
  /// The arguments behind the tool's path.
  std::vector<std::string> options(DataRole role = DataRole::train) {
    prepared("echo shard", role);
    std::vector<std::string> arguments = python_->arguments();
    EXPECT_THAT(arguments.at(0), EndsWith("/prepare_data"));
    arguments.erase(arguments.begin());
    return arguments;
  }
  /// What is thrown when the tool does `script`, and with which exit code.
  std::string failure(std::string_view script, int code) {
    try {
      prepared(script);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return {};
  }

  DataDirectory data_;
  RunConfig run_;
  std::optional<FakePython> python_;
  std::vector<std::string> said_;
};

TEST_F(DatasetPreparation, FilesOfARoleAreTakenAsTheyAre) {
  run_.dataset.clear();
  run_.train_file = {"a.txt", "b"};
  run_.validation_file = {"c.safetensors"};
  EXPECT_THAT(prepared("exit 1"), ElementsAre("a.txt", "b"));
  EXPECT_THAT(prepared("exit 1", DataRole::held_out), ElementsAre("c.safetensors"));
  EXPECT_EQ(data_key(run_, DataRole::train), "train_file");
  EXPECT_EQ(data_key(run_, DataRole::held_out), "validation_file");
  EXPECT_EQ(data_key(RunConfig{}, DataRole::train), "");
}

TEST_F(DatasetPreparation, TheToolIsToldWhatTheRunIsTold) {
  EXPECT_THAT(options(), ElementsAre("--tokenizer=" + data_.path("model"), "--model-config=model/config.json",
                                     "--cutoff-len=2048", "--overlong=keep-text", "--on-bad-line=error",
                                     "--cache=" + data_.path("data/.layerstream"), "--print-shards", "--",
                                     data_.path("chats.jsonl")));
}

TEST_F(DatasetPreparation, EveryKeyHasItsOption) {
  const std::string info = data_.write("data/dataset_info.json", "{}");
  run_.dataset = {"mine", "-yours"};
  run_.tokenizer_name = "tokenizer";
  run_.chat_template = "my template.jinja";
  run_.cutoff_len = 100;
  run_.overlong = Overlong::drop;
  run_.on_bad_line = OnBadLine::skip;
  run_.train_on_prompt = true;
  run_.mask_history = true;
  run_.mix_strategy = MixStrategy::interleave_over;
  run_.interleave_probs = {0.7, 0.3};
  run_.seed = 7;
  run_.tokenized_path = "tokens";
  EXPECT_THAT(options(),
              ElementsAre("--tokenizer=tokenizer", "--model-config=model/config.json",
                          "--dataset-info=" + info, "--cutoff-len=100", "--overlong=drop",
                          "--on-bad-line=skip", "--chat-template-file=my template.jinja", "--train-on-prompt",
                          "--mask-history", "--mix-strategy=interleave_over", "--interleave-probs=0.7,0.3",
                          "--seed=7", "--output=tokens/train", "--print-shards", "--", "mine", "-yours"));
}

TEST_F(DatasetPreparation, HeldOutDataIsNotMixedAndHasAPlaceOfItsOwn) {
  run_.eval_dataset = {data_.write("held.jsonl", "{}")};
  run_.mix_strategy = MixStrategy::interleave_under;
  run_.tokenized_path = "tokens";
  EXPECT_THAT(options(DataRole::held_out),
              AllOf(Contains("--output=tokens/eval"), Contains(data_.path("held.jsonl")),
                    Not(Contains(data_.path("chats.jsonl"))), Not(Contains(StartsWith("--mix"))),
                    Not(Contains(StartsWith("--seed")))));
}

TEST_F(DatasetPreparation, StandardOutputNamesTheShardsAndTheRestIsForTheLog) {
  EXPECT_THAT(prepared("echo one >&2; echo /x/a b.safetensors; echo two >&2; echo c.safetensors"),
              ElementsAre("/x/a b.safetensors", "c.safetensors"));
  EXPECT_THAT(said_, ElementsAre("one", "two"));
}

TEST_F(DatasetPreparation, WhatTheToolRefusesIsRefusedInItsWordsWithTheCommand) {
  const std::string message =
      failure("echo reading >&2; echo 'prepare_data: a.jsonl:3: bad' >&2; echo 'second line' >&2; exit 1",
              exit_code::refused);
  EXPECT_THAT(message,
              StartsWith("prepare_data: a.jsonl:3: bad\nsecond line\nThe command, to run it by hand: " +
                         python_->path() + " "));
  EXPECT_THAT(message, HasSubstr("/prepare_data --tokenizer="));
  EXPECT_THAT(said_, ElementsAre("reading"));
}

TEST_F(DatasetPreparation, ACrashOfTheToolIsAFailureWithItsLastWords) {
  EXPECT_THAT(
      failure(
          "echo so far >&2; echo 'Traceback (most recent call last):' >&2; echo 'ValueError: x' >&2; exit 1",
          exit_code::failure),
      AllOf(HasSubstr("ended with exit code 1:\nTraceback (most recent call last):\nValueError: x\n"),
            HasSubstr("by hand")));
  EXPECT_THAT(said_, ElementsAre("so far"));
  EXPECT_THAT(failure("echo 'no such option' >&2; exit 9", exit_code::failure),
              HasSubstr("ended with exit code 9:\nno such option\n"));
  EXPECT_THAT(failure("kill -s KILL $$", exit_code::failure),
              HasSubstr("was killed by signal 9, maybe for want of memory\n"));
  EXPECT_THAT(failure("exit 0", exit_code::failure), HasSubstr("named no token shards\n"));
}

TEST_F(DatasetPreparation, AMissingPythonIsNamedWithTheRemedy) {
  run_.python = data_.path("no/python");
  EXPECT_THAT(message_of<ConfigError>([&] { prepared_inputs(run_, DataRole::train, "model/config.json"); }),
              AllOf(StartsWith("python: "), HasSubstr("No such file or directory"),
                    HasSubstr("pip install tokenizers jinja2")));
}

TEST_F(DatasetPreparation, ADatasetThatIsNowhereIsRefusedBeforeAnythingRuns) {
  run_.dataset.emplace_back("mine");
  EXPECT_THAT(failure("exit 0", exit_code::refused),
              AllOf(HasSubstr("dataset: 'mine' is neither a file nor a directory"),
                    HasSubstr("data/dataset_info.json")));
  EXPECT_THAT(python_->arguments(), IsEmpty());
}

TEST_F(DatasetPreparation, TokenShardsAreReadAsTheyAre) {
  const std::string shard = data_.write("ready/tokens-1.safetensors", "");
  for (const std::string& ready : {shard, data_.path("ready")}) {
    said_.clear();
    run_.dataset = {ready};
    EXPECT_THAT(prepared("exit 1"), ElementsAre(ready));
    EXPECT_THAT(said_, ElementsAre(AllOf(HasSubstr(ready), HasSubstr("read as they are"))));
    EXPECT_THAT(ready_inputs(run_, DataRole::train), ::testing::Optional(ElementsAre(ready)));
  }
  run_.mix_strategy = MixStrategy::interleave_under;
  EXPECT_THAT(message_of<ConfigError>([&] { ready_inputs(run_, DataRole::train); }),
              AllOf(HasSubstr("mix_strategy: interleave_under"), HasSubstr("dataset: '" + run_.dataset[0])));
  run_.dataset.push_back(data_.path("chats.jsonl"));
  EXPECT_THAT(message_of<ConfigError>([&] { ready_inputs(run_, DataRole::train); }),
              AllOf(HasSubstr(data_.path("ready")), HasSubstr("chats.jsonl' does not")));
}

TEST_F(DatasetPreparation, NothingRunsToFindOutWhetherDataIsReady) {
  run_.python = data_.path("no/python");
  EXPECT_EQ(ready_inputs(run_, DataRole::train), std::nullopt);
  EXPECT_THAT(ready_inputs(run_, DataRole::held_out), ::testing::Optional(IsEmpty()));
}

TEST_F(DatasetPreparation, AThrowingPollStopsTheToolAndIsThrown) {
  const FakePython python(data_.root(), "exec sleep 1000");
  run_.python = python.path();
  StopRequest stop;
  stop.request(SIGTERM);
  EXPECT_THROW(prepared_inputs(run_, DataRole::train, "model/config.json",
                               {.poll = [&] { stop.throw_if_requested("preparing"); }}),
               Interrupted);
}

TEST(TokenTexts, AreThoseBesideTheShard) {
  const DataDirectory data;
  data.write("a/.tokens.json", R"(["x", "", " y"])");
  TokenTexts texts;
  EXPECT_EQ(texts.quoted(data.path("a/s.safetensors"), 0), "'x'");
  EXPECT_EQ(texts.quoted(data.path("a/s.safetensors"), 2), "' y'");
  for (const std::int32_t none : {1, 3, -1}) EXPECT_EQ(texts.quoted(data.path("a/s.safetensors"), none), "");
  EXPECT_EQ(texts.quoted(data.path("b/s.safetensors"), 0), "");
}

TEST(TokenTexts, AMalformedFileIsNamed) {
  const DataDirectory data;
  data.write("a/.tokens.json", R"({"x": 1})");
  data.write("b/.tokens.json", "[");
  data.write("c/.tokens.json", "[1]");
  for (const std::string directory : {"a", "b", "c"}) {
    TokenTexts texts;
    EXPECT_THAT(message_of<FileError>([&] { texts.quoted(data.path(directory + "/s.safetensors"), 0); }),
                HasSubstr(data.path(directory + "/.tokens.json")));
  }
}

}  // namespace
}  // namespace layerstream::io
