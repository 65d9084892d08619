#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/signals.hpp"
#include "engine/trainer.hpp"
#include "engine_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {

/// config.json of a model small enough to train in milliseconds, with room for byte tokens.
inline nlohmann::ordered_json small_model_json(bool tied = true) {
  return {{"model_type", "qwen3"},       {"vocab_size", 260},       {"hidden_size", 32},
          {"intermediate_size", 48},     {"num_hidden_layers", 3},  {"num_attention_heads", 4},
          {"num_key_value_heads", 2},    {"head_dim", 8},           {"max_position_embeddings", 256},
          {"initializer_range", 0.1},    {"rms_norm_eps", 1e-6},    {"rope_theta", 10000.0},
          {"tie_word_embeddings", tied}, {"torch_dtype", "float32"}};
}

/// ASCII words; a function of the seed.
inline std::string text_of_words(std::size_t bytes, std::uint64_t seed) {
  std::string text;
  for (std::uint64_t i = 0; text.size() < bytes; ++i) {
    const auto word = static_cast<std::size_t>(uniform_at(seed, 3, i) * 12.0);
    static const char* const words[] = {"the", "layer", "streams", "its",  "weights", "to",
                                        "a",   "slot",  "and",     "then", "forgets", "them"};
    text += words[word];
    text += i % 11 == 10 ? ".\n" : " ";
  }
  text.resize(bytes);
  return text;
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

/// A directory with a model configuration, training data and places for runs.
class RunFiles {
 public:
  explicit RunFiles(const std::filesystem::path& parent = fast_directory()) : scratch_(parent) {
    write_text(path("model/config.json"), small_model_json().dump(2));
    write_text(path("data.txt"), text_of_words(20 * 32 - 1, 1));  // with the end of document: 20 rows of 32
  }
  std::filesystem::path path(const std::string& name) const { return scratch_.path() / name; }

  /// 5 steps of 4 rows are an epoch.
  RunConfig config(const std::string& output = "out") const {
    RunConfig run;
    run.config_name = path("model").string();
    run.train_file = {path("data.txt").string()};
    run.output_dir = path(output).string();
    run.cutoff_len = 32;
    run.per_device_train_batch_size = 2;
    run.gradient_accumulation_steps = 2;
    run.max_steps = 12;
    run.learning_rate = 3e-3;
    run.lr_scheduler_type = SchedulerType::cosine;
    run.warmup_steps = 2;
    run.weight_decay = 0.1;
    run.compute_dtype = DType::f32;
    run.chunk_tokens = 64;
    run.optimizer_threads = 1;
    run.save_steps = 0;
    return run;
  }

 private:
  ScratchDirectory scratch_;
};

/// A trainer with all that must outlive it.
class TestRun {
 public:
  explicit TestRun(const RunConfig& run, const EngineDiagnostics& diagnostics = {})
      : trainer_(std::make_unique<Trainer>(LoadedConfig{.run = run, .origins = {}}, *device_, stop_,
                                           Log(lines_), diagnostics)) {}
  Trainer& operator*() { return *trainer_; }
  Trainer* operator->() { return trainer_.get(); }
  StopRequest& stop() { return stop_; }
  std::string log() const { return lines_.str(); }

  /// Weights and moments, with nothing pending.
  std::vector<std::vector<std::uint8_t>> slabs() {
    trainer_->engine().apply_pending();
    return slab_bytes(trainer_->engine().parameters());
  }

 private:
  std::ostringstream lines_;
  std::unique_ptr<Device> device_ = make_test_device(std::size_t{1} << 30);
  StopRequest stop_;
  std::unique_ptr<Trainer> trainer_;
};

/// metrics.jsonl without what a clock says.
inline std::vector<std::string> metrics_lines(const std::filesystem::path& output_dir) {
  std::ifstream stream(output_dir / "metrics.jsonl");
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    auto json = nlohmann::ordered_json::parse(line);
    json.erase("seconds");
    lines.push_back(json.dump());
  }
  return lines;
}

inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// What a run leaves: to be equal bit by bit.
struct Outcome {
  std::vector<std::vector<std::uint8_t>> slabs;
  std::vector<std::string> metrics;
  std::int64_t applied_steps = 0;
  std::int64_t tokens_seen = 0;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

inline Outcome outcome(TestRun& run, const RunConfig& config) {
  return {run.slabs(), metrics_lines(config.output_dir), run->state().applied_steps,
          run->state().tokens_seen};
}

inline Outcome train_to_the_end(const RunConfig& config) {
  TestRun run(config);
  const TrainingEnd end = run->run();
  EXPECT_FALSE(end.interrupted);
  EXPECT_EQ(end.global_step, config.max_steps);
  return outcome(run, config);
}

}  // namespace layerstream::test
