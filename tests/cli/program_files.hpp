#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "child_process.hpp"
#include "tests/engine/run_fixture.hpp"

namespace layerstream::test {

/// Files for runs of the program: a model configuration, training data and a configuration of the run.
class ProgramFiles {
 public:
  /// On a disk: checkpoints here are large, and saving is to take time.
  ProgramFiles() : files_(std::filesystem::temp_directory_path()) { write_config(files_.config()); }

  std::filesystem::path path(const std::string& name) const { return files_.path(name); }
  RunConfig config() const { return files_.config(); }
  void write_config(const RunConfig& run) { write_text(path("run.yaml"), config_yaml(run)); }

  /// `layerstream COMMAND run.yaml --set KEY=VALUE ...`
  std::vector<std::string> arguments(const std::string& command,
                                     const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> all{command, path("run.yaml").string()};
    for (const std::string& text : overrides) {
      all.push_back("--set");
      all.push_back(text);
    }
    return all;
  }
  ChildResult run(const std::string& command, const std::vector<std::string>& overrides = {}) const {
    return run_program(arguments(command, overrides));
  }

  /// Replaces the model's configuration.
  void write_model(const nlohmann::ordered_json& json) {
    write_text(path("model/config.json"), json.dump(2));
  }

 private:
  RunFiles files_;
};

}  // namespace layerstream::test
