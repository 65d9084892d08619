#include "io/run_metrics.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "data_files.hpp"
#include "faulty_file_system.hpp"
#include "io/file_source.hpp"

namespace layerstream::io {
namespace {

namespace fs = std::filesystem;
using testing::DataDirectory;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;

TEST(RunMetrics, WritesWhatIsAskedForBesideMetricsJsonl) {
  const DataDirectory directory;
  std::ostringstream lines;
  RunMetrics({directory.root()}, {}, 0, Log(lines)).write(1, {{"loss", 2.5}});
  EXPECT_TRUE(fs::exists(directory.path("metrics.jsonl")));
  EXPECT_FALSE(fs::exists(directory.path("metrics.csv")));
  EXPECT_FALSE(fs::exists(directory.path("tensorboard")));
  const std::vector<std::string> all{"csv", "tensorboard"};
  RunMetrics({directory.root()}, all, 1, Log(lines)).write(2, {{"loss", 1.5}});
  EXPECT_EQ(read_text(directory.path("metrics.jsonl")),
            "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":1.5}\n");
  EXPECT_EQ(read_text(directory.path("metrics.csv")), "step,loss\n2,1.5\n");
  EXPECT_TRUE(fs::exists(directory.path("tensorboard")));
  EXPECT_EQ(lines.str(), "");
}

TEST(RunMetrics, ADiskThatFailsEndsThemWithWarningsNotTheRun) {
  const DataDirectory directory;
  std::ostringstream lines;
  const std::vector<std::string> all{"csv", "tensorboard"};
  const auto counted = std::make_shared<FaultyFileSystem>();
  { const RunMetrics elsewhere(directory.path(""), all, 0, Log(lines), counted); }
  const DataDirectory full;
  const int closed = 3;  // files, when the counted one was gone
  RunMetrics metrics({full.root()}, all, 0, Log(lines),
                     std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::disk_full_from,
                                                        counted->calls() - closed + 1));
  metrics.write(1, {{"loss", 2.5}});
  metrics.write(2, {{"loss", 2.5}});
  for (const char* name : {"metrics.jsonl", "metrics.csv", "the TensorBoard events"})
    EXPECT_THAT(lines.str(), HasSubstr(fmt::format("this run goes on without {}", name)));
  EXPECT_EQ(read_text(full.path("metrics.jsonl")), "");
}

}  // namespace
}  // namespace layerstream::io
