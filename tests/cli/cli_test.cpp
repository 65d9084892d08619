// The program: what it prints, what it refuses, and with which exit code.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/checkpoint_io.hpp"
#include "engine/model_io.hpp"
#include "io/safetensors.hpp"
#include "program_files.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

class Program : public ::testing::Test {
 protected:
  /// A run that must be refused before step 0, leaving no trace; returns what it said.
  std::string refused(const std::string& command, const std::vector<std::string>& overrides) {
    const ChildResult result = files_.run(command, overrides);
    EXPECT_EQ(result.exit_code, exit_code::refused) << result.err;
    EXPECT_FALSE(fs::exists(files_.path("out")));
    return result.err;
  }
  /// The checkpoint of a short run.
  std::string trained(int steps = 2, const std::vector<std::string>& more = {}) {
    std::vector<std::string> overrides{fmt::format("max_steps={}", steps)};
    overrides.insert(overrides.end(), more.begin(), more.end());
    const ChildResult result = files_.run("train", overrides);
    EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
    return files_.path(fmt::format("out/checkpoint-{}", steps)).string();
  }
  ProgramFiles files_;
};

// --- use ---

TEST_F(Program, HelpListsTheCommandsAndTheExitCodes) {
  const ChildResult result = run_program({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("train"), HasSubstr("plan"), HasSubstr("replan"), HasSubstr("export"),
                    HasSubstr("generate"), HasSubstr("inspect-data"), HasSubstr("75 interrupted")));
}

TEST_F(Program, ACommandLineThatMeansNothingIsRefused) {
  EXPECT_EQ(run_program({}).exit_code, exit_code::refused);
  EXPECT_EQ(run_program({"trian"}).exit_code, exit_code::refused);
  EXPECT_EQ(run_program({"train"}).exit_code, exit_code::refused);
  EXPECT_EQ(run_program({"train", files_.path("run.yaml").string(), "--no-such-option"}).exit_code,
            exit_code::refused);
  EXPECT_THAT(run_program({"train", files_.path("absent.yaml").string()}).err, HasSubstr("absent.yaml"));
}

TEST_F(Program, TrainingSaysWhatItDoesAndLeavesACheckpoint) {
  const ChildResult result = files_.run("train", {"max_steps=3"});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("kernels: "), HasSubstr("data: rows: 20"), HasSubstr("fp32 master"),
                                HasSubstr("step 3/3  loss "), HasSubstr("ETA"), HasSubstr("saved "),
                                HasSubstr("peak memory of the process ")));
  EXPECT_EQ(metrics_lines(files_.path("out")).size(), 3U);
  EXPECT_TRUE(io::newest_complete(files_.path("out")));
}

// --- 5, 7: where host memory lies, and which backend ---

TEST_F(Program, TheBannerSaysWhichBackendAndNodeAndWhy) {
  const ChildResult result = files_.run("train", {"max_steps=1"});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("backend explicit: the device does not share the host's page tables"),
                    HasSubstr("host memory: ")));
}

TEST_F(Program, AMemoryNodeThatIsNotThereIsRefused) {
  EXPECT_THAT(refused("train", {"numa=977"}), AllOf(HasSubstr("numa: 977"), HasSubstr("auto, or off")));
}

// --- 28: configuration ---

TEST_F(Program, AnUnknownKeyIsRefusedWithPlaceAndSuggestion) {
  write_text(files_.path("run.yaml"), "output_dir: out\nlearning_rat: 1e-3\n");
  EXPECT_THAT(refused("train", {}),
              AllOf(HasSubstr("run.yaml:2"), HasSubstr("learning_rat"), HasSubstr("learning_rate")));
  files_.write_config(files_.config());
  EXPECT_THAT(refused("train", {"batch_size=4"}),
              AllOf(HasSubstr("--set"), HasSubstr("batch_size"), HasSubstr("per_device_train_batch_size")));
  EXPECT_THAT(refused("plan", {"cutoff_len=many"}),
              AllOf(HasSubstr("cutoff_len"), HasSubstr("integer >= 2")));
}

TEST_F(Program, WhatIsNeededAndNotSetIsNamed) {
  EXPECT_THAT(refused("train", {"train_file="}), HasSubstr("train_file"));
  EXPECT_THAT(refused("train", {"output_dir="}), HasSubstr("output_dir"));
  EXPECT_THAT(refused("train", {"config_name="}), HasSubstr("no model"));
}

TEST_F(Program, PrintConfigShowsEveryValueAndItsOriginAndDoesNothing) {
  std::vector<std::string> arguments = files_.arguments("train", {"learning_rate=0.25"});
  arguments.push_back("--print-config");
  const ChildResult result = run_program(arguments);
  EXPECT_EQ(result.exit_code, exit_code::success);
  EXPECT_THAT(result.out, AllOf(HasSubstr("learning_rate: 0.25"), HasSubstr("--set"), HasSubstr("run.yaml:"),
                                HasSubstr("loss_tile_tokens: ")));
  EXPECT_FALSE(fs::exists(files_.path("out")));
  // It is a configuration.
  write_text(files_.path("again.yaml"), result.out);
  const ChildResult again = run_program({"train", files_.path("again.yaml").string(), "--print-config"});
  EXPECT_EQ(again.exit_code, exit_code::success) << again.err;
  EXPECT_THAT(again.out, HasSubstr("learning_rate: 0.25"));
}

// --- 1, 2: memory ---

TEST_F(Program, MemoryThatDoesNotSufficeIsRefusedWithNeedAndHave) {
  for (const std::string command : {"plan", "train"}) {
    EXPECT_THAT(refused(command, {"host_memory_limit=1MiB"}),
                AllOf(HasSubstr("host memory: need "), HasSubstr("have 1.00 MiB (host_memory_limit)"),
                      HasSubstr("Adam moments"), HasSubstr("lower chunk_tokens")));
    EXPECT_THAT(
        refused(command, {"device_memory_limit=64KiB"}),
        AllOf(HasSubstr("device memory: need "), HasSubstr("have 64.00 KiB ("), HasSubstr("weight slots")));
  }
}

TEST_F(Program, PlanAndTrainAgreeOnTheLeastMemory) {
  // The total of the plan, less one page of rounding either way, is the limit.
  const std::string plan = files_.run("plan").out;
  const std::size_t at = plan.find("host    total");
  ASSERT_NE(at, std::string::npos) << plan;
  EXPECT_THAT(plan, AllOf(HasSubstr("device  total"), HasSubstr("fits: host has ")));
#ifdef LAYERSTREAM_TEST_ON_GPU
  // A process that uses CUDA takes hundreds of MiB before it has a slab.
  const std::string enough = "host_memory_limit=8GiB";
#else
  EXPECT_THAT(plan, HasSubstr("process peak"));
  const std::string enough = "host_memory_limit=100MiB";
#endif
  // Far below what the process's code and libraries alone take, far above what the slabs take.
  EXPECT_EQ(files_.run("plan", {"host_memory_limit=5MiB"}).exit_code, exit_code::refused);
  EXPECT_EQ(files_.run("train", {"host_memory_limit=5MiB", "max_steps=1"}).exit_code, exit_code::refused);
  EXPECT_EQ(files_.run("plan", {enough}).exit_code, exit_code::success);
  EXPECT_EQ(files_.run("train", {enough, "max_steps=1"}).exit_code, exit_code::success);
}

// --- data ---

TEST_F(Program, TextThatIsNotUtf8IsNamedByFileLineAndByte) {
  write_text(files_.path("bad.txt"), "one\ntwo \xff three\n");
  const std::string override = "train_file=" + files_.path("bad.txt").string();
  EXPECT_THAT(refused("train", {override}), HasSubstr(files_.path("bad.txt").string() + ":2:5"));
  EXPECT_THAT(refused("inspect-data", {override}), HasSubstr("bad.txt:2:5"));
}

TEST_F(Program, AVocabularyTooSmallForBytesIsRefused) {
  auto model = small_model_json();
  model["vocab_size"] = 100;
  files_.write_model(model);
  EXPECT_THAT(refused("train", {}), AllOf(HasSubstr("vocab_size of 257"), HasSubstr("the model has 100")));
}

TEST_F(Program, AShardWithIdsBeyondTheVocabularyIsRefused) {
  const std::vector<std::int32_t> ids{1, 2, 300, 4};
  io::SafetensorsWriter writer(std::make_shared<io::FileSystem>(), files_.path("shard.safetensors"),
                               {{"input_ids", DType::i32, {4}}});
  writer.append(std::as_bytes(std::span(ids)));
  writer.finish();
  EXPECT_THAT(
      refused("train", {"train_file=" + files_.path("shard.safetensors").string()}),
      AllOf(HasSubstr("shard.safetensors"), HasSubstr("element 2 is 300"), HasSubstr("vocabulary of 260")));
}

TEST_F(Program, InspectDataShowsCountsAndTokensBesideTheirMask) {
  std::vector<std::string> arguments = files_.arguments("inspect-data");
  arguments.insert(arguments.end(), {"--rows", "1", "--tokens", "4"});
  const ChildResult result = run_program(arguments);
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("rows: 20 of up to 32 tokens"), HasSubstr("row 0: 32 tokens"),
                    HasSubstr("predicts"), HasSubstr("and 28 more tokens"), Not(HasSubstr("row 1"))));
  EXPECT_FALSE(fs::exists(files_.path("out")));
}

// --- models ---

TEST_F(Program, AMalformedModelDirectoryIsRefusedWithTheFile) {
  write_text(files_.path("model/config.json"), "{\"model_type\": \"qwen3\",");
  EXPECT_THAT(refused("train", {}), HasSubstr("model/config.json"));
  files_.write_model({{"model_type", "gpt_bigcode"}});
  EXPECT_THAT(refused("plan", {}), AllOf(HasSubstr("model/config.json"), HasSubstr("gpt_bigcode")));
  files_.write_model(small_model_json());
  const std::string model = "model_name_or_path=" + files_.path("model").string();
  EXPECT_THAT(refused("train", {"config_name=", model}), HasSubstr("neither model.safetensors nor"));
  write_text(files_.path("model/model.safetensors"), "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(refused("train", {"config_name=", model}), HasSubstr("model.safetensors"));
  EXPECT_THAT(refused("train", {"config_name=" + files_.path("nowhere").string()}), HasSubstr("nowhere"));
}

TEST_F(Program, ExportGivesTheSameModelInTheDtypeOfItsSource) {
  const std::string checkpoint = trained();
  const auto exported = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"export", "--checkpoint", checkpoint, "--output",
                                       files_.path(name).string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ChildResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
    return io::ModelFiles(files_.path(name)).find("model.norm.weight")->dtype;
  };
  EXPECT_EQ(exported("own", {}), DType::f32);
  EXPECT_EQ(exported("half/", {"--dtype", "bf16"}), DType::bf16);
  EXPECT_EQ(exported("ieee", {"--dtype", "fp16"}), DType::f16);

  const auto generated = [&](const std::string& from, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"generate", "--checkpoint",  from,
                                       "--prompt", "the layer",     "--max-new-tokens",
                                       "40",       "--temperature", "0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ChildResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
    return result.out;
  };
  const std::string text = generated(checkpoint);
  EXPECT_THAT(text, StartsWith("the layer"));
  EXPECT_EQ(generated(checkpoint), text) << "greedy";
  EXPECT_EQ(generated(files_.path("own").string()), text);

  const ChildResult again =
      run_program({"export", "--checkpoint", checkpoint, "--output", files_.path("own").string()});
  EXPECT_EQ(again.exit_code, exit_code::refused);
  EXPECT_THAT(again.err, HasSubstr("not an empty directory"));
}

TEST_F(Program, ABf16ModelThatWasTrainedIsExportedInBf16) {
  auto model = small_model_json();
  model["torch_dtype"] = "bfloat16";
  files_.write_model(model);
  const std::string checkpoint = trained();
  const ChildResult result =
      run_program({"export", "--checkpoint", checkpoint, "--output", files_.path("export").string()});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  const io::ModelFiles exported(files_.path("export"));
  for (const std::string& name : exported.names()) EXPECT_EQ(exported.find(name)->dtype, DType::bf16);
}

TEST_F(Program, GenerateTakesIdsAndSeeds) {
  const std::string checkpoint = trained();
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"generate", "--checkpoint", checkpoint, "--max-new-tokens", "20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  };
  const ChildResult ids = generate({"--prompt-ids", "116,104,101"});
  EXPECT_EQ(ids.exit_code, exit_code::success) << ids.err;
  EXPECT_THAT(ids.out, MatchesRegex("([0-9]+ ){19}[0-9]+\n"));
  EXPECT_EQ(generate({"--prompt-ids", "116,104,101"}).out, ids.out);
  EXPECT_NE(generate({"--prompt-ids", "116,104,101", "--seed", "7"}).out, ids.out);
  EXPECT_EQ(generate({"--prompt", ""}).exit_code, exit_code::success);

  const auto refusal = [&](const std::vector<std::string>& more) {
    const ChildResult result = generate(more);
    EXPECT_EQ(result.exit_code, exit_code::refused) << result.err;
    return result.err;
  };
  EXPECT_THAT(refusal({"--prompt-ids", "260"}), HasSubstr("260 is outside the vocabulary of 260"));
  EXPECT_THAT(refusal({"--prompt-ids", "-1"}), HasSubstr("-1"));
  EXPECT_THAT(refusal({"--prompt-ids", "1", "--prompt", "a"}), HasSubstr("excludes"));
  EXPECT_THAT(refusal({"--temperature", "-1"}), HasSubstr("temperature"));
  EXPECT_THAT(refusal({"--max-new-tokens", "0"}), HasSubstr("max-new-tokens"));
  write_text(fs::path(checkpoint) / "tokenizer.json", "{}");
  EXPECT_THAT(refusal({"--prompt", "a"}), HasSubstr("tokenizer of its own"));
  EXPECT_THAT(run_program({"generate", "--checkpoint", files_.path("nowhere").string()}).err,
              HasSubstr("nowhere"));
}

TEST_F(Program, GenerateEndsBeforeAnEndToken) {
  const std::string checkpoint = trained();
  const auto generated = [&](const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"generate",     "--checkpoint", checkpoint,         "--seed", "7",
                                       "--prompt-ids", "116,104,101",  "--max-new-tokens", "20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ChildResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
    return result.out;
  };
  const std::string whole = generated();
  std::istringstream text(whole);
  const std::vector<int> ids{std::istream_iterator<int>(text), {}};
  ASSERT_EQ(ids.size(), 20u);
  const int end = ids[10];
  const std::vector<int> before(ids.begin(), std::ranges::find(ids, end));
  write_text(fs::path(checkpoint) / "generation_config.json",
             fmt::format(R"({{"eos_token_id": [{}]}})", end));
  EXPECT_EQ(generated(), fmt::format("{}\n", fmt::join(before, " ")));
  EXPECT_EQ(generated({"--ignore-eos"}), whole);
}

TEST_F(Program, GenerateWithAVocabularyTooSmallForBytesAsksForIds) {
  auto model = small_model_json();
  model["vocab_size"] = 100;
  files_.write_model(model);
  const std::vector<std::int32_t> tokens(64, 7);
  io::SafetensorsWriter writer(std::make_shared<io::FileSystem>(), files_.path("shard.safetensors"),
                               {{"input_ids", DType::i32, {64}}});
  writer.append(std::as_bytes(std::span(tokens)));
  writer.finish();
  const std::string checkpoint = trained(1, {"train_file=" + files_.path("shard.safetensors").string()});
  const ChildResult result = run_program({"generate", "--checkpoint", checkpoint, "--prompt", "a"});
  EXPECT_EQ(result.exit_code, exit_code::refused);
  EXPECT_THAT(result.err, AllOf(HasSubstr("vocabulary of 100"), HasSubstr("--prompt-ids"),
                                Not(HasSubstr("tokenizer of its own"))));
}

// --- resume, failure ---

TEST_F(Program, ARunIsContinuedWhereItStopped) {
  const std::string straight = trained(6);
  const auto lines = metrics_lines(files_.path("out"));
  fs::rename(files_.path("out"), files_.path("straight"));
  trained(6, {"max_steps=6", "save_steps=4"});
  fs::remove_all(files_.path("out/checkpoint-6"));
  const ChildResult refused = files_.run("train", {"max_steps=6"});
  EXPECT_EQ(refused.exit_code, exit_code::refused);
  EXPECT_THAT(refused.err, HasSubstr("resume_from_checkpoint: auto"));
  const ChildResult result = files_.run("train", {"max_steps=6", "resume_from_checkpoint=auto"});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err, HasSubstr("at step 4 of 6"));
  EXPECT_EQ(metrics_lines(files_.path("out")), lines);
  for (const std::string name :
       {"block-00000.safetensors", "block-00004.safetensors", "trainer_state.json"}) {
    EXPECT_EQ(read_text(files_.path("out/checkpoint-6") / name),
              read_text(files_.path("straight/checkpoint-6") / name));
  }
}

TEST_F(Program, ARunThatDivergesEndsWithItsOwnExitCode) {
  const ChildResult result = files_.run(
      "train", {"learning_rate=1e30", "lr_scheduler_type=constant", "warmup_steps=0", "max_skipped_steps=3"});
  EXPECT_EQ(result.exit_code, exit_code::not_finite) << result.err;
  EXPECT_THAT(result.err, HasSubstr("3 steps in a row were left out, the last one because loss"));
  EXPECT_FALSE(io::newest_complete(files_.path("out")));
}

}  // namespace
}  // namespace layerstream::test
