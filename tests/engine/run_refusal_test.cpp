// What a run refuses before step 0: nothing is made, and the message says what is wrong.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/simulated_device.hpp"
#include "engine/checkpoint_io.hpp"
#include "run_fixture.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Refusal : public ::testing::Test {
 protected:
  /// The refusal of a run that goes on from a checkpoint of three steps, after `change`.
  std::string after(const std::function<void(RunConfig&)>& change) {
    RunConfig config = files_.config();
    if (!fs::exists(config.output_dir)) {
      TestRun run(config);
      for (int i = 0; i < 3; ++i) run->step();
      run->save();
    }
    config.resume_from_checkpoint = "auto";
    change(config);
    return message_of<Error>([&] { TestRun run(config); });
  }
  RunFiles files_;
};

TEST_F(Refusal, AResumeWithAnotherSeedBatchDataOrModelNamesTheDifference) {
  EXPECT_THAT(after([](RunConfig& run) { run.seed = 43; }),
              AllOf(HasSubstr("seed was 42 and is 43 now"), HasSubstr("checkpoint-3")));
  EXPECT_THAT(after([](RunConfig& run) { run.gradient_accumulation_steps = 3; }),
              HasSubstr("per_device_train_batch_size x gradient_accumulation_steps was 4 and is 6 now"));
  EXPECT_THAT(after([](RunConfig& run) { run.cutoff_len = 31; }), HasSubstr("content of the training data"));
  write_text(files_.path("data.txt"), text_of_words(639, 2));
  EXPECT_THAT(after([](RunConfig&) {}), HasSubstr("content of the training data"));
  write_text(files_.path("data.txt"), text_of_words(639, 1));
  auto model = small_model_json();
  model["rope_theta"] = 20000.0;
  model["use_cache"] = false;  // no matter by itself
  write_text(files_.path("model/config.json"), model.dump());
  EXPECT_THAT(after([](RunConfig&) {}), AllOf(HasSubstr("checkpoint-3"), HasSubstr("rope_theta")));
  model["rope_theta"] = 10000.0;
  write_text(files_.path("model/config.json"), model.dump());
  RunConfig config = files_.config();
  config.resume_from_checkpoint = "auto";
  EXPECT_NO_THROW(TestRun run(config));
}

/// Copies a checkpoint, passing each tensor through `change`, which may drop it or alter its dtype.
void copy_checkpoint(const fs::path& from, const fs::path& output_dir,
                     const std::function<bool(std::string& name, DType& dtype)>& change) {
  const io::CheckpointReader reader(from);
  io::CheckpointWriter writer(output_dir, reader.step());
  for (const io::CheckpointFile& entry : reader.files()) {
    if (!entry.name.ends_with(".safetensors")) {
      writer.text(entry.name, reader.text(entry.name));
      continue;
    }
    const io::SafetensorsFile file = reader.safetensors(entry.name);
    std::vector<io::TensorSpec> specs;
    std::vector<const io::TensorEntry*> sources;
    for (const io::TensorEntry& tensor : file.entries()) {
      std::string name = tensor.name;
      DType dtype = tensor.dtype;
      if (!change(name, dtype)) continue;
      specs.push_back({name, dtype, tensor.shape});
      sources.push_back(&tensor);
    }
    io::SafetensorsWriter& copy = writer.safetensors(entry.name, specs);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(sources[i]->numel()) * size_of(specs[i].dtype));
      file.read(*sources[i], 0, bytes);
      copy.append(specs[i].name, bytes);
    }
    copy.finish();
  }
  writer.commit();
}

TEST_F(Refusal, ALossyResumeIsRefusedWithFileAndTensor) {
  const RunConfig config = files_.config();
  {
    TestRun run(config);
    run->step();
    run->save();
  }
  const fs::path good = fs::path(config.output_dir) / "checkpoint-1";
  const auto resumed = [&](const fs::path& output) {
    RunConfig other = config;
    other.output_dir = output.string();
    other.resume_from_checkpoint = "auto";
    return other;
  };
  copy_checkpoint(good, files_.path("unchanged"), [](std::string&, DType&) { return true; });
  EXPECT_NO_THROW(TestRun run(resumed(files_.path("unchanged"))));

  for (const std::string part : {"/exp_avg", "/exp_avg_sq", "/hi", "/lo"}) {
    const std::string victim = "model.layers.1.mlp.up_proj.weight" + part;
    const fs::path dropped = files_.path("dropped" + part);
    copy_checkpoint(good, dropped, [&](std::string& name, DType&) { return name != victim; });
    EXPECT_THAT(
        message_of<FileError>([&] { TestRun run(resumed(dropped)); }),
        AllOf(HasSubstr(victim), HasSubstr("block-00002.safetensors"), HasSubstr("cannot be resumed")));
  }
  for (const std::string part : {"/exp_avg", "/exp_avg_sq"}) {
    const std::string victim = "model.layers.1.mlp.up_proj.weight" + part;
    const fs::path rounded = files_.path("rounded" + part);
    copy_checkpoint(good, rounded, [&](std::string& name, DType& dtype) {
      if (name == victim) dtype = DType::bf16;
      return true;
    });
    EXPECT_THAT(message_of<FileError>([&] { TestRun run(resumed(rounded)); }),
                AllOf(HasSubstr(victim), HasSubstr("bf16"), HasSubstr("refusing a lossy resume")));
  }
}

TEST_F(Refusal, AnOutputDirectoryWithCheckpointsIsNotOverwritten) {
  EXPECT_THAT(after([](RunConfig& run) { run.resume_from_checkpoint.clear(); }),
              AllOf(HasSubstr("checkpoint-3"), HasSubstr("resume_from_checkpoint: auto")));
}

TEST_F(Refusal, ANamedCheckpointThatIsNotThereIsNamed) {
  EXPECT_THAT(
      after([&](RunConfig& run) { run.resume_from_checkpoint = files_.path("out/checkpoint-99").string(); }),
      HasSubstr("checkpoint-99"));
}

TEST_F(Refusal, TooLittleDiskForTheCheckpointsToComeIsFoundBeforeAnythingIsMade) {
  RunConfig config = files_.config();
  config.max_steps = 2'000'000'000;
  config.save_steps = 1;
  EXPECT_THAT(message_of<ResourceError>([&] { TestRun run(config); }),
              AllOf(HasSubstr("checkpoints need"), HasSubstr("free")));
  EXPECT_FALSE(fs::exists(config.output_dir));
  config.save_total_limit = 2;
  EXPECT_NO_THROW(TestRun run(config));
}

TEST_F(Refusal, TooLittleMemoryIsFoundBeforeAnythingIsMade) {
  for (const auto limit : {&RunConfig::host_memory_limit, &RunConfig::device_memory_limit}) {
    RunConfig config = files_.config();
    config.*limit = 100'000;
    config.train_file = {files_.path("absent.txt").string()};                           // not even looked for
    SimulatedDevice device(config.device_memory_limit.value_or(std::size_t{1} << 30));  // runs nothing
    StopRequest stop;
    std::ostringstream lines;
    EXPECT_THAT(message_of<ResourceError>(
                    [&] { Trainer trainer({.run = config, .origins = {}}, device, stop, Log(lines)); }),
                AllOf(HasSubstr("need "), HasSubstr("have 97.66 KiB"), HasSubstr("Adam moments")));
    EXPECT_FALSE(fs::exists(config.output_dir));
  }
}

TEST_F(Refusal, WeightsThatDoNotFitTheConfigurationAreFoundBeforeAnythingIsMade) {
  const RunConfig fresh = files_.config("source");
  TestRun source(fresh);
  export_model(
      source->engine().parameters(),
      {.directory = files_.path("weights"), .config_json = small_model_json().dump(), .dtype = DType::f32});
  auto model = small_model_json();
  model["intermediate_size"] = 64;
  write_text(files_.path("weights/config.json"), model.dump());
  RunConfig config = files_.config();
  config.config_name.clear();
  config.model_name_or_path = files_.path("weights").string();
  EXPECT_THAT(message_of<FileError>([&] { TestRun run(config); }), HasSubstr("of another shape or type (9)"));
  EXPECT_FALSE(fs::exists(config.output_dir));
}

}  // namespace
}  // namespace layerstream::test
