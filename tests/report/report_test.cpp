// What `layerstream report` and `compare` read, compute, and put into their page.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.hpp"
#include "report/comparison.hpp"
#include "report/figures.hpp"
#include "report/page.hpp"
#include "tests/io/data_files.hpp"

namespace layerstream::report {
namespace {

using io::testing::DataDirectory;
using io::testing::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

/// The lines of three steps and two evaluations.
constexpr std::string_view metrics =
    "{\"step\":0,\"eval_loss\":5.5}\n"
    "{\"step\":1,\"loss\":5.25,\"num_tokens\":100,\"seconds\":0.5,\"applied\":true}\n"
    "{\"step\":2,\"loss\":null,\"num_tokens\":100,\"seconds\":1.0,\"applied\":false}\n"
    "{\"step\":2,\"eval_loss\":4.5,\"eval_tokens\":7}\n"
    "{\"step\":3,\"loss\":4.0,\"grad_norm\":1.5,\"num_tokens\":50,\"seconds\":0.5,\"applied\":true}\n";

std::string record(const std::string& learning_rate, const std::string& device) {
  return fmt::format(
      R"({{"steps": {{"total": 9}}, "device": "{}", "model": {{"config": "a", "layers": 3}},
          "configuration": [{{"key": "learning_rate", "value": "{}", "from": "--set"}},
                            {{"key": "output_dir", "value": "{}", "from": "--set"}},
                            {{"key": "seed", "value": "42", "from": "default"}}]}})",
      device, learning_rate, learning_rate);
}

TEST(RunDirectory, LinesBecomeSeries) {
  const DataDirectory files;
  files.write("metrics.jsonl", metrics);
  const RunDirectory run = read_run(files.root());
  EXPECT_THAT(run.training.steps, ElementsAre(1, 2, 3));
  EXPECT_THAT(run.training.of("num_tokens"), ElementsAre(100.0, 100.0, 50.0));
  EXPECT_THAT(run.training.of("applied"), ElementsAre(1.0, 0.0, 1.0));
  EXPECT_TRUE(std::isnan(run.training.of("loss")[1]));
  EXPECT_TRUE(std::isnan(run.training.of("grad_norm")[0]));
  EXPECT_EQ(run.training.of("grad_norm")[2], 1.5);
  EXPECT_THAT(run.training.of("eval_loss"), IsEmpty());
  EXPECT_THAT(run.evaluation.steps, ElementsAre(0, 2));
  EXPECT_THAT(run.evaluation.of("eval_loss"), ElementsAre(5.5, 4.5));
  EXPECT_TRUE(run.record.is_null());
  EXPECT_TRUE(run.timeline.is_null());
}

TEST(RunDirectory, ALastLineThatIsBeingWrittenIsLeftOut) {
  const DataDirectory files;
  for (const std::string torn : {"{\"step\":4,\"lo", "{\"step\":4,\"loss\":1.0}", "\"\n"}) {
    files.write("metrics.jsonl", std::string(metrics) + torn);
    EXPECT_THAT(read_run(files.root()).training.steps, ElementsAre(1, 2, 3)) << torn;
  }
}

TEST(RunDirectory, WhatIsMissingOrBrokenIsNamed) {
  const DataDirectory files;
  EXPECT_THAT(message_of<FileError>([&] { read_run(files.path("absent")); }),
              AllOf(HasSubstr("absent: no such directory"), HasSubstr("output_dir")));
  EXPECT_THAT(message_of<FileError>([&] { read_run(files.root()); }), HasSubstr("has no metrics.jsonl"));
  files.write("metrics.jsonl", "{\"step\":0,\"eval_loss\":5.5}\n{\"step\":1");
  EXPECT_THAT(message_of<FileError>([&] { read_run(files.root()); }),
              HasSubstr("no finished line of a step"));
  files.write("metrics.jsonl", "{\"step\":1,\"loss\":1.0}\nrubbish\n{\"step\":2,\"loss\":1.0}\n");
  EXPECT_THAT(message_of<FileError>([&] { read_run(files.root()); }),
              HasSubstr("metrics.jsonl:2: is not JSON"));
  files.write("metrics.jsonl", metrics);
  files.write("run.json", "[1]");
  EXPECT_THAT(message_of<FileError>([&] { read_run(files.root()); }),
              HasSubstr("run.json: is not a JSON object"));
}

TEST(Figures, AreOfTheWholeRun) {
  const DataDirectory files;
  files.write("metrics.jsonl", metrics);
  files.write("run.json", record("0.1", "a"));
  EXPECT_THAT(figures_of(read_run(files.root())),
              ElementsAre(Pair("steps", "3 of 9"), Pair("steps that changed nothing", "1"),
                          Pair("last loss", "4.0000"), Pair("best eval_loss", "4.5000 (step 2)"),
                          Pair("last eval_loss", "4.5000 (step 2)"), Pair("tokens per second, median", "100"),
                          Pair("tokens", "250"), Pair("time in steps", "2 s")));
}

TEST(Comparison, TellsWhatDiffers) {
  const DataDirectory files;
  for (const std::string run : {"x/one", "y/one"}) files.write(run + "/metrics.jsonl", metrics);
  files.write("x/one/run.json", record("0.1", "card A"));
  files.write("y/one/run.json", record("0.2", "card B"));
  const std::vector<RunDirectory> runs{read_run(files.path("x/one")), read_run(files.path("y/one/"))};
  const Comparison comparison = compare(runs);
  EXPECT_THAT(comparison.names, ElementsAre("x/one", "y/one"));
  ASSERT_EQ(comparison.configuration.size(), 2U);
  EXPECT_EQ(comparison.configuration[0].name, "learning_rate");
  EXPECT_THAT(comparison.configuration[0].values, ElementsAre("0.1", "0.2"));
  EXPECT_EQ(comparison.configuration[1].name, "device");
  EXPECT_THAT(
      comparison.to_text(),
      AllOf(HasSubstr(
                "               x/one   y/one\nlearning_rate  0.1     0.2\ndevice         card A  card B\n"),
            HasSubstr("best eval_loss"), Not(HasSubstr("seed")), Not(HasSubstr("output_dir"))));
}

TEST(Comparison, ARunWithoutRecordHasNoValues) {
  const DataDirectory files;
  files.write("a/metrics.jsonl", metrics);
  files.write("b/metrics.jsonl", metrics);
  files.write("a/run.json", record("0.1", "card"));
  const std::vector<RunDirectory> runs{read_run(files.path("a")), read_run(files.path("b"))};
  EXPECT_THAT(compare(runs).to_text(), HasSubstr("learning_rate  0.1   -\n"));
  const std::vector<RunDirectory> same{read_run(files.path("a")), read_run(files.path("a"))};
  EXPECT_THAT(compare(same).to_text(), HasSubstr("nothing differs"));
}

/// What the page's script would parse.
nlohmann::json data_of(const std::string& html) {
  const std::string_view opening = "id=\"data\">";
  const std::size_t begin = html.find(opening) + opening.size();
  return nlohmann::json::parse(html.substr(begin, html.find("</script>", begin) - begin));
}

TEST(Page, ItsDataReadBackAsTheyWere) {
  const DataDirectory files;
  files.write("metrics.jsonl", metrics);
  files.write("timeline.json", "{\"step\":3}");
  const nlohmann::json data = data_of(html_page(report_data(read_run(files.root()))));
  const nlohmann::json& run = data["runs"][0];
  EXPECT_EQ(run["training"]["step"], (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(run["training"]["loss"][0], 5.25);
  EXPECT_TRUE(run["training"]["loss"][1].is_null());
  EXPECT_EQ(run["evaluation"]["eval_loss"][1], 4.5);
  EXPECT_EQ(run["timeline"]["step"], 3);
  EXPECT_TRUE(run["record"].is_null());
  EXPECT_EQ(data["figures"][0][0], "steps");
}

TEST(Page, NoTextOfARunCanEndTheScriptOrBeginATag) {
  const DataDirectory files;
  const std::string name = "a&<b> <!--<script>";
  const std::string value = "</script><script>alert(1)</script>\\u2028<!-- @script@ @style@";
  files.write(name + "/metrics.jsonl", metrics);
  files.write(name + "/run.json", nlohmann::json{{"device", value}}.dump());
  const std::string html = html_page(report_data(read_run(files.path(name))));
  const nlohmann::json data = data_of(html);
  EXPECT_EQ(data["runs"][0]["record"]["device"], value);
  EXPECT_EQ(data["title"], name);
  EXPECT_THAT(html, HasSubstr("<title>a&amp;&lt;b> &lt;!--&lt;script></title>"));
  std::size_t scripts = 0;
  for (std::size_t at = html.find("<script"); at != std::string::npos; at = html.find("<script", at + 1))
    ++scripts;
  EXPECT_EQ(scripts, 2U);  // the data and the program
  EXPECT_THAT(html, Not(HasSubstr("<!--")));
}

TEST(Page, NeedsNothingFromElsewhere) {
  const DataDirectory files;
  files.write("metrics.jsonl", metrics);
  const std::string html = html_page(report_data(read_run(files.root())));
  // The one address is the name of SVG's elements.
  std::string rest = html;
  const std::string svg = "http://www.w3.org/2000/svg";
  for (std::size_t at = rest.find(svg); at != std::string::npos; at = rest.find(svg))
    rest.erase(at, svg.size());
  EXPECT_THAT(rest, AllOf(Not(HasSubstr("http:")), Not(HasSubstr("https:")), Not(HasSubstr("src=")),
                          Not(HasSubstr("@import"))));
}

}  // namespace
}  // namespace layerstream::report
