// Which checkpoints a run leaves where it cannot remove them.
#include "engine/checkpoint_keeper.hpp"

#include <gmock/gmock.h>

#include "run_fixture.hpp"

namespace layerstream::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// On which nothing can be removed: checkpoints first get the name of something temporary.
class ReadOnlyCheckpoints final : public io::FileSystem {
 public:
  int rename(const char* from, const char* to) override {
    if (!is_writable && std::string_view(to).ends_with(".tmp")) {
      errno = EPERM;
      return -1;
    }
    return FileSystem::rename(from, to);
  }
  bool is_writable = false;
};

TEST(CheckpointKeeper, GoesOnWithoutRemovingWhatCannotBeRemoved) {
  const RunFiles files;
  RunConfig config = files.config();
  config.save_total_limit = 1;
  TestRun run(config);
  const ParameterStore& store = std::as_const(run->engine()).parameters();
  const std::string model = small_model_json().dump();
  const auto disk = std::make_shared<ReadOnlyCheckpoints>();
  std::ostringstream lines;
  const CheckpointKeeper keeper(config, model, Log(lines), disk);
  TrainerState state = run->state();
  const auto steps_after_saving = [&](std::int64_t step) {
    state.global_step = step;
    keeper.save(store, state);
    std::vector<std::int64_t> steps;
    for (const io::FoundCheckpoint& found : io::find_checkpoints(config.output_dir))
      steps.push_back(found.step);
    return steps;
  };
  EXPECT_THAT(steps_after_saving(1), ElementsAre(1));
  EXPECT_EQ(lines.str().find("save_total_limit"), std::string::npos);
  EXPECT_THAT(steps_after_saving(2), ElementsAre(1, 2));
  EXPECT_THAT(lines.str(), HasSubstr("checkpoints beyond save_total_limit are left"));
  EXPECT_THAT(steps_after_saving(3), ElementsAre(1, 2, 3));
  disk->is_writable = true;
  EXPECT_THAT(steps_after_saving(4), ElementsAre(4));
}

}  // namespace
}  // namespace layerstream::test
