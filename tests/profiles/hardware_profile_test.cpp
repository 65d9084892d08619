#include "profiles/hardware/hardware_profile.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/error.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::filesystem::path profile_folder() {
  return std::filesystem::path(std::getenv("LAYERSTREAM_TEST_DATA")).parent_path() / "profiles" / "hardware";
}

/// A profile that is right, to be spoilt.
std::string sound_profile() {
  std::ifstream file(profile_folder() / "h200-pcie5-128g.yaml");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::size_t line_of(const std::string& text, const std::string& part) {
  return 1 + static_cast<std::size_t>(
                 std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(text.find(part)), '\n'));
}

/// The profile with the line that has `part` replaced by `by` (nothing: removed).
std::string with_line(const std::string& part, const std::string& by) {
  std::string text = sound_profile();
  const std::size_t at = text.find(part);
  EXPECT_NE(at, std::string::npos) << part;
  const std::size_t begin = text.rfind('\n', at) + 1;
  const std::size_t end = text.find('\n', at) + 1;
  return text.replace(begin, end - begin, by.empty() ? "" : by + "\n");
}

std::string refusal_of(const std::string& yaml) {
  return message_of<ConfigError>([&] { parse_hardware_profile(yaml, "box.yaml"); });
}

TEST(HardwareProfile, EveryShippedProfileIsSoundAndNamedLikeItsFile) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(profile_folder())) {
    if (entry.path().extension() != ".yaml") continue;
    EXPECT_EQ(load_hardware_profile(entry.path()).name, entry.path().stem().string());
    ++count;
  }
  EXPECT_GE(count, 7);
}

TEST(HardwareProfile, WhatIsWrittenReadsBack) {
  const HardwareProfile profile = parse_hardware_profile(sound_profile(), "box.yaml");
  const std::string text = to_yaml(profile, "one\ntwo");
  EXPECT_THAT(text, ::testing::StartsWith("# one\n# two\n"));
  const HardwareProfile again = parse_hardware_profile(text, "again.yaml");
  EXPECT_EQ(to_yaml(again, "one\ntwo"), text);
  EXPECT_EQ(again.device.memory_bytes.value, profile.device.memory_bytes.value);
  EXPECT_EQ(again.link.coherent, profile.link.coherent);
  EXPECT_EQ(again.device.bf16_gemm_flops_per_second.points().size(),
            profile.device.bf16_gemm_flops_per_second.points().size());
  // Four digits are written.
  EXPECT_NEAR(again.host.adamw_parameters_per_second.value / profile.host.adamw_parameters_per_second.value,
              1.0, 5e-4);
  EXPECT_EQ(again.host.adamw_parameters_per_second.source, profile.host.adamw_parameters_per_second.source);
}

TEST(HardwareProfile, ACurveIsInterpolatedOverTheLogarithmAndFlatBeyondItsEnds) {
  const RateCurve curve({{.at = 1000, .rate = {10.0, "a"}}, {.at = 4000, .rate = {20.0, "b"}}});
  EXPECT_DOUBLE_EQ(curve.at(10), 10.0);
  EXPECT_DOUBLE_EQ(curve.at(1000), 10.0);
  EXPECT_NEAR(curve.at(2000), 15.0, 1e-12);
  EXPECT_DOUBLE_EQ(curve.at(1e9), 20.0);
}

TEST(HardwareProfile, AMissingKeyIsNamedWithItsSectionsLineAndItsForm) {
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", "")),
              AllOf(HasSubstr(fmt::format("box.yaml:{}: `link.copy_seconds` is missing",
                                          line_of(sound_profile(), "\nlink:") + 1)),
                    HasSubstr("{value: NUMBER, source: WHO SAYS SO} in s")));
  EXPECT_THAT(refusal_of("name: x\ndescription: y\n"),
              AllOf(HasSubstr("section `device` is missing"), HasSubstr("section `host` is missing")));
  EXPECT_THAT(refusal_of("42\n"), HasSubstr("box.yaml: a hardware profile has the sections"));
}

TEST(HardwareProfile, AnUnknownOrRepeatedKeyIsRefused) {
  const std::string line = "  copy_seconds: {value: 1e-6, source: x}";
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", line + "\n  copy_secs: {value: 1, source: x}")),
              AllOf(HasSubstr("unknown key `link.copy_secs`; known here: "), HasSubstr("copy_seconds")));
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", line + "\n" + line)),
              HasSubstr("`link.copy_seconds` is given twice"));
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", "  copy_seconds: {value: 1e-6, src: x}")),
              AllOf(HasSubstr("unknown key `link.copy_seconds.src`"),
                    HasSubstr("`link.copy_seconds.source` is missing or empty")));
}

class BadNumber : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(BadNumber, IsRefusedWithFileLineKeyAndUnit) {
  const auto [value, complaint] = GetParam();
  const std::string key = "to_device_bytes_per_second";
  const std::string message = refusal_of(
      with_line("  " + key + ":", fmt::format("  {}: {{value: {}, source: measured}}", key, value)));
  EXPECT_THAT(message, AllOf(HasSubstr(fmt::format("box.yaml:{}: `link.{}.value`",
                                                   line_of(sound_profile(), "  " + key + ":"), key)),
                             HasSubstr(complaint), HasSubstr("bytes/s")));
}

INSTANTIATE_TEST_SUITE_P(
    HardwareProfile, BadNumber,
    ::testing::Values(std::pair{".nan", "not a finite number"}, std::pair{".inf", "not a finite number"},
                      std::pair{"1e999", "not a finite number"}, std::pair{"fast", "not a finite number"},
                      std::pair{"''", "not a finite number"}, std::pair{"0", "check the unit"},
                      std::pair{"-5e10", "check the unit"}, std::pair{"55.4", "check the unit"},  // GB/s
                      std::pair{"999999", "check the unit"},                                      // < 1 MB/s
                      std::pair{"1.1e14", "check the unit"}));  // > 100 TB/s

TEST(HardwareProfile, ANumberWithoutASourceIsRefused) {
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", "  copy_seconds: {value: 1e-6}")),
              HasSubstr("`link.copy_seconds.source` is missing or empty"));
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", "  copy_seconds: {value: 1e-6, source: ' '}")),
              HasSubstr("`link.copy_seconds.source` is missing or empty"));
  EXPECT_THAT(refusal_of(with_line("  copy_seconds:", "  copy_seconds: 1e-6")),
              HasSubstr("every number says where it is from"));
}

TEST(HardwareProfile, ACurveMustAscendAndHoldRates) {
  const std::string point = "    - {tokens: 8192, value: 7e14, source: x}";
  EXPECT_THAT(refusal_of(with_line("tokens: 256,", point)),
              HasSubstr("bf16_gemm_flops_per_second[1].tokens` must be larger than the one before it"));
  EXPECT_THAT(refusal_of(with_line("tokens: 256,", "    - {tokens: 256, value: 700, source: x}")),
              HasSubstr("`device.bf16_gemm_flops_per_second[0].value` = 700 is refused"));
  EXPECT_THAT(refusal_of(with_line("tokens: 256,", "    - {value: 7e14, source: x}")),
              HasSubstr("`device.bf16_gemm_flops_per_second[0].tokens` is missing"));
}

TEST(HardwareProfile, RatesThatContradictEachOtherAreRefused) {
  EXPECT_THAT(refusal_of(with_line("  duplex_bytes_per_second:",
                                   "  duplex_bytes_per_second: {value: 200e9, source: x}")),
              HasSubstr("must lie between the faster direction (5.54e+10) and the sum of both"));
  EXPECT_THAT(refusal_of(with_line("  adamw_beside_copies_parameters_per_second:",
                                   "  adamw_beside_copies_parameters_per_second: {value: 5e9, source: x}")),
              HasSubstr("is more than alone"));
}

TEST(HardwareProfile, EverythingThatIsWrongIsToldAtOnce) {
  std::string text = with_line("  copy_seconds:", "");
  text.replace(text.find("coherent: false"), 15, "coherent: maybe");
  EXPECT_THAT(refusal_of(text), AllOf(HasSubstr("box.yaml: 2 problems"), HasSubstr("link.copy_seconds"),
                                      HasSubstr("`link.coherent` must be true or false")));
}

TEST(HardwareProfile, AFileThatCannotBeReadSaysWhereProfilesAre) {
  EXPECT_THAT(message_of<ConfigError>([] { load_hardware_profile("/nowhere/x.yaml"); }),
              AllOf(HasSubstr("/nowhere/x.yaml: cannot be read"), HasSubstr("layerstream calibrate")));
}

}  // namespace
}  // namespace layerstream::test
