#include "io/metrics_csv.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

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

TEST(MetricsCsv, CellsStandUnderTheirNamesAndWhatIsNoNumberIsEmpty) {
  const DataDirectory directory;
  CsvMetrics metrics(directory.path("m.csv"));
  metrics.write(
      1,
      {{"loss", 2.5}, {"tokens", std::int64_t{4096}}, {"applied", true}, {"note", std::string("a,\"b\"")}});
  metrics.write(2, {{"tokens", std::int64_t{7}}, {"loss", NAN}});
  EXPECT_EQ(read_text(directory.path("m.csv")),
            "step,loss,tokens,applied,note\n1,2.5,4096,true,\"a,\"\"b\"\"\"\n2,,7,,\n");
}

TEST(MetricsCsv, DoublesSurviveExactly) {
  const DataDirectory directory;
  { CsvMetrics(directory.path("m")).write(1, {{"x", 1.0 / 3.0}}); }
  const std::string text = read_text(directory.path("m"));
  EXPECT_EQ(std::stod(text.substr(text.rfind(',') + 1)), 1.0 / 3.0);
}

TEST(MetricsCsv, AMetricThatComesLaterIsAFurtherColumn) {
  const DataDirectory directory;
  CsvMetrics metrics(directory.path("m"));
  metrics.write(1, {{"loss", 2.5}});
  metrics.write(1, {{"eval_loss", 3.5}});
  metrics.write(2, {{"loss", 1.5}});
  EXPECT_EQ(read_text(directory.path("m")), "step,loss,eval_loss\n1,2.5,\n1,,3.5\n2,1.5,\n");
}

TEST(MetricsCsv, ResumeCutsTheStepsThatAreRepeatedAndATornLine) {
  const DataDirectory directory;
  const std::string path = directory.write("m", "step,loss,norm\n1,5,1\n2,4,1\n3,3,1\n4,2");
  { CsvMetrics(path, 2).write(3, {{"norm", 2.5}, {"loss", 3.5}}); }
  EXPECT_EQ(read_text(path), "step,loss,norm\n1,5,1\n2,4,1\n3,3.5,2.5\n");
  { CsvMetrics(path, 9).write(10, {{"loss", 1.5}}); }
  EXPECT_EQ(read_text(path), "step,loss,norm\n1,5,1\n2,4,1\n3,3.5,2.5\n10,1.5,\n");
}

TEST(MetricsCsv, AFileOfSomethingElseIsNamedAndLeftAlone) {
  const DataDirectory directory;
  for (const std::string text : {"name,place\nAda,London\n", "1,2\n2,3\n"}) {
    const std::string path = directory.write("m", text);
    EXPECT_THAT(message_of<FileError>([&] { CsvMetrics(path, 2); }),
                AllOf(HasSubstr(path + ":1: is "), HasSubstr("move the file away")));
    EXPECT_EQ(read_text(path), text);
  }
}

TEST(MetricsCsv, FullDiskIsAnErrorAndLeavesWholeLines) {
  const DataDirectory directory;
  CsvMetrics(directory.path("m")).write(1, {{"x", 1.5}});
  const std::string before = read_text(directory.path("m"));
  // 1: open; 2: half of the line.
  const auto full = std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::disk_full_from, 2);
  CsvMetrics metrics(directory.path("m"), 1, full);
  EXPECT_THROW(metrics.write(2, {{"x", 2.5}}), FileError);
  EXPECT_THROW(metrics.write(2, {{"y", 2.5}}), FileError);  // while a further column is made
  EXPECT_EQ(read_text(directory.path("m")), before);
}

}  // namespace
}  // namespace layerstream::io
