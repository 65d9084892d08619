#include "io/metrics.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "data_files.hpp"
#include "faulty_file_system.hpp"
#include "io/file_source.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

TEST(Metrics, LinesAreObjectsInTheOrderOfTheirFields) {
  const DataDirectory directory;
  MetricsWriter metrics(directory.path("metrics.jsonl"));
  metrics.write(
      1,
      {{"loss", 2.5}, {"tokens", std::int64_t{4096}}, {"skipped", false}, {"note", std::string("a\n\"b\"")}});
  // Before the writer is gone: a killed run keeps the line.
  EXPECT_EQ(read_text(directory.path("metrics.jsonl")),
            "{\"step\":1,\"loss\":2.5,\"tokens\":4096,\"skipped\":false,\"note\":\"a\\n\\\"b\\\"\"}\n");
}

TEST(Metrics, DoublesSurviveExactlyAndNonFiniteOnesAreNull) {
  const DataDirectory directory;
  const double third = 1.0 / 3.0;
  {
    MetricsWriter metrics(directory.path("m"));
    metrics.write(1, {{"x", third}});
    metrics.write(2, {{"x", NAN}, {"y", std::numeric_limits<double>::infinity()}});
  }
  const std::string text = read_text(directory.path("m"));
  EXPECT_EQ(std::stod(text.substr(text.find("x\":") + 3)), third);
  EXPECT_THAT(text, HasSubstr("{\"step\":2,\"x\":null,\"y\":null}\n"));
}

TEST(Metrics, ResumeCutsTheStepsThatAreRepeated) {
  const DataDirectory directory;
  const std::string path = directory.path("m");
  {
    MetricsWriter metrics(path);
    for (std::int64_t step = 1; step <= 5; ++step) metrics.write(step, {});
  }
  {
    MetricsWriter metrics(path, 3);
    metrics.write(4, {{"again", true}});
  }
  EXPECT_EQ(read_text(path), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4,\"again\":true}\n");
}

TEST(Metrics, ResumeAtTheLastStepKeepsAllAndLinesWithoutAStep) {
  const DataDirectory directory;
  const std::string lines = "{\"event\":\"start\"}\n{\"step\":1}\n{\"step\":2}\n";
  const std::string path = directory.write("m", lines);
  { MetricsWriter metrics(path, 2); }
  EXPECT_EQ(read_text(path), lines);
}

TEST(Metrics, TornLastLineIsCutOff) {
  const DataDirectory directory;
  for (const std::string& torn :
       std::vector<std::string>{"{\"step\":2,\"lo", "{\"step\":2}", "{\"st\n", std::string("\0\0\0\n", 4)}) {
    const std::string path = directory.write("m", "{\"step\":1}\n" + torn);
    {
      MetricsWriter metrics(path, 7);
      metrics.write(8, {});
    }
    EXPECT_EQ(read_text(path), "{\"step\":1}\n{\"step\":8}\n") << torn;
  }
}

TEST(Metrics, MalformedLineInTheMiddleIsNamedAndNothingIsCut) {
  const DataDirectory directory;
  const std::string lines = "{\"step\":1}\ngarbage\n{\"step\":2}\n";
  const std::string path = directory.write("m", lines);
  EXPECT_THAT(
      message_of<FileError>([&] { MetricsWriter(path, 2); }),
      AllOf(StartsWith(path + ":2: is not JSON"), HasSubstr("repair the line, or move the file away")));
  EXPECT_EQ(read_text(path), lines);
}

TEST(Metrics, FullDiskIsAnErrorAndLeavesNoTornLine) {
  const DataDirectory directory;
  // 1: open; 2: the first line; 3: half of the second.
  const auto files = std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::disk_full_from, 3);
  MetricsWriter metrics(directory.path("m"), 0, files);
  metrics.write(1, {});
  EXPECT_THAT(message_of<FileError>([&] { metrics.write(2, {}); }),
              StartsWith(directory.path("m") + ": writing 11 bytes failed: No space left on device"));
  EXPECT_EQ(read_text(directory.path("m")), "{\"step\":1}\n");
}

}  // namespace
}  // namespace layerstream::io
