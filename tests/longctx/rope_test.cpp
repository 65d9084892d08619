#include "longctx/rope.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

namespace layerstream {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr double fp32_half_ulp = 0x1p-24;  // largest relative error of one rounding to fp32

struct Golden {
  std::string name;
  RopeSpec rope;
  std::int64_t head_dim, max_positions, sequence_length;
  std::vector<float> inverse_frequencies;
  double attention_scaling;
  json rows;

  RopeFrequencies frequencies() const {
    return rope_frequencies(rope, head_dim, max_positions, sequence_length);
  }
};

RopeType type_of(const std::string& name) {
  if (name == "default") return RopeType::standard;
  if (name == "linear") return RopeType::linear;
  if (name == "dynamic") return RopeType::dynamic;
  if (name == "llama3") return RopeType::llama3;
  if (name == "yarn") return RopeType::yarn;
  if (name == "longrope") return RopeType::longrope;
  throw std::runtime_error("rope.json: unknown rope_type " + name);
}

RopeSpec spec_of(const json& parameters) {
  RopeSpec rope;
  const auto read = [&](const char* key, auto& field) {
    if (parameters.contains(key) && !parameters[key].is_null()) parameters[key].get_to(field);
  };
  rope.type = type_of(parameters["rope_type"].get<std::string>());
  read("rope_theta", rope.theta);
  read("factor", rope.factor);
  read("original_max_position_embeddings", rope.original_max_position_embeddings);
  read("low_freq_factor", rope.low_freq_factor);
  read("high_freq_factor", rope.high_freq_factor);
  read("beta_fast", rope.beta_fast);
  read("beta_slow", rope.beta_slow);
  read("attention_factor", rope.attention_factor);
  read("mscale", rope.mscale);
  read("mscale_all_dim", rope.mscale_all_dim);
  read("truncate", rope.truncate);
  read("short_factor", rope.short_factor);
  read("long_factor", rope.long_factor);
  return rope;
}

/// Written by tools/goldens/rope_goldens.py; the versions that made it are in its "made_by".
std::vector<Golden> read_goldens() {
  const char* folder = std::getenv("LAYERSTREAM_TEST_DATA");
  if (folder == nullptr)
    throw std::runtime_error("set LAYERSTREAM_TEST_DATA to <repository>/tests, as ctest does");
  std::ifstream file(std::string(folder) + "/golden/rope.json");
  std::vector<Golden> goldens;
  const json document = json::parse(file);
  for (const json& entry : document["cases"]) {
    goldens.push_back({.name = entry["name"],
                       .rope = spec_of(entry["rope_parameters"]),
                       .head_dim = entry["head_dim"],
                       .max_positions = entry["max_position_embeddings"],
                       .sequence_length = entry["sequence_length"],
                       .inverse_frequencies = entry["inverse_frequencies"],
                       .attention_scaling = entry["attention_scaling"],
                       .rows = entry["rows"]});
  }
  return goldens;
}

/// What fp32 arithmetic may do to transformers' own inverse frequencies, relative: the exponent 2i/d is
/// rounded, which theta^x magnifies by ln(theta) <= 13.9, then pow, reciprocal and at most two products or
/// quotients: 20 roundings. The fp32 base of dynamic adds its own few, times d/(d−2). Where llama3 and yarn
/// interpolate, the weight's error of about 20 roundings meets values that differ by `factor`.
double exact_tolerance(const RopeSpec& rope) {
  const bool interpolates = rope.type == RopeType::llama3 || rope.type == RopeType::yarn;
  return fp32_half_ulp * 20.0 * (interpolates ? 1.0 + std::max(rope.factor, 4.0) : 1.0);
}

struct Tables {
  explicit Tables(const Golden& golden, RopePrecision precision)
      : pairs(golden.head_dim / 2), cos(elements(golden)), sin(elements(golden)) {
    const Shape shape{golden.sequence_length, pairs};
    fill_rope_tables(TensorView(cos.data(), shape), TensorView(sin.data(), shape), golden.frequencies(),
                     precision);
  }
  std::size_t elements(const Golden& golden) const {
    return static_cast<std::size_t>(golden.sequence_length * pairs);
  }
  std::int64_t pairs;
  std::vector<float> cos, sin;
};

/// Calls check(table value, golden value, pair, position) for each stored cos and sin.
template <class Check>
void for_each_entry(const Golden& golden, const Tables& tables, const Check& check) {
  for (const json& row : golden.rows) {
    const auto position = row["position"].get<std::int64_t>();
    const auto cos = row["cos"].get<std::vector<float>>(), sin = row["sin"].get<std::vector<float>>();
    for (std::int64_t pair = 0; pair < tables.pairs; ++pair) {
      const auto i = static_cast<std::size_t>(pair),
                 at = static_cast<std::size_t>(position * tables.pairs + pair);
      check(tables.cos[at], cos[i], i, position);
      check(tables.sin[at], sin[i], i, position);
    }
  }
}

TEST(RopeGolden, CoversEveryType) {
  std::vector<bool> seen(6, false);
  for (const Golden& golden : read_goldens()) seen[static_cast<std::size_t>(golden.rope.type)] = true;
  EXPECT_THAT(seen, ::testing::Each(true));
}

TEST(RopeGolden, ExactFrequenciesAreThoseOfTransformersWithinItsFp32Rounding) {
  for (const Golden& golden : read_goldens()) {
    const RopeFrequencies ours = golden.frequencies();
    ASSERT_EQ(ours.inverse_frequencies.size(), golden.inverse_frequencies.size()) << golden.name;
    for (std::size_t i = 0; i < golden.inverse_frequencies.size(); ++i) {
      EXPECT_NEAR(ours.inverse_frequencies[i] / golden.inverse_frequencies[i], 1.0,
                  exact_tolerance(golden.rope))
          << golden.name << ", pair " << i;
    }
    // Both are a handful of double operations.
    EXPECT_NEAR(ours.attention_scaling / golden.attention_scaling, 1.0, 1e-15) << golden.name;
  }
}

TEST(RopeGolden, HfFrequenciesAreThoseOfTransformersToTheLastBits) {
  for (const Golden& golden : read_goldens()) {
    const RopeFrequencies ours = golden.frequencies();
    ASSERT_EQ(ours.hf_inverse_frequencies.size(), golden.inverse_frequencies.size()) << golden.name;
    std::size_t unequal = 0;
    for (std::size_t i = 0; i < golden.inverse_frequencies.size(); ++i) {
      const double theirs = golden.inverse_frequencies[i],
                   difference = ours.hf_inverse_frequencies[i] - theirs;
      // Every step but pow is the same IEEE operation. Two pow functions that are each within an ulp differ
      // by two at most, and so, after rounding, by three ulps in the reciprocal.
      EXPECT_LE(std::abs(difference), 6.0 * fp32_half_ulp * theirs) << golden.name << ", pair " << i;
      if (difference != 0.0) ++unequal;
    }
    RecordProperty(golden.name, static_cast<int>(unequal));
    // Measured; it is the proof that the roundings are followed step by step.
    EXPECT_LE(unequal, golden.inverse_frequencies.size() / 16) << golden.name;
  }
}

TEST(RopeGolden, ExactTablesAreThoseOfTransformersWithinTheErrorOfItsAngles) {
  for (const Golden& golden : read_goldens()) {
    const RopeFrequencies ours = golden.frequencies();
    for_each_entry(golden, Tables(golden, RopePrecision::exact),
                   [&](float value, float theirs, std::size_t pair, std::int64_t position) {
                     const double angle = static_cast<double>(position) * ours.inverse_frequencies[pair];
                     // |d cos| <= |d angle|; the fp32 product is one more rounding; then cos or sin to an ulp
                     // and two products with the scaling.
                     const double tolerance =
                         ours.attention_scaling *
                         (angle * (exact_tolerance(golden.rope) + fp32_half_ulp) + 5.0 * fp32_half_ulp);
                     EXPECT_NEAR(value, theirs, tolerance) << golden.name << ", " << position << ", " << pair;
                   });
  }
}

TEST(RopeGolden, HfTablesAreThoseOfTransformersToTheLastBits) {
  std::size_t unequal = 0, all = 0;
  for (const Golden& golden : read_goldens()) {
    const RopeFrequencies ours = golden.frequencies();
    for_each_entry(golden, Tables(golden, RopePrecision::hf),
                   [&](float value, float theirs, std::size_t pair, std::int64_t position) {
                     const double angle = static_cast<double>(position) * ours.inverse_frequencies[pair];
                     const bool same_angle =
                         ours.hf_inverse_frequencies[pair] == golden.inverse_frequencies[pair];
                     // From the same angle cos and sin differ by two ulps of 1 at most, then times the
                     // scaling; else by the difference of the angles too.
                     const double tolerance =
                         ours.attention_scaling * fp32_half_ulp * (5.0 + (same_angle ? 0.0 : 8.0 * angle));
                     EXPECT_NEAR(value, theirs, tolerance) << golden.name << ", " << position << ", " << pair;
                     ++all;
                     if (value != theirs) ++unequal;
                   });
  }
  RecordProperty("unequal", static_cast<int>(unequal));
  ASSERT_GT(all, 0u);
  EXPECT_LE(unequal, all / 16);
}

TEST(Rope, ExactTablesRoundTheScaledCosineOnce) {
  const RopeSpec rope{
      .type = RopeType::yarn, .theta = 1e6, .factor = 4.0, .original_max_position_embeddings = 64};
  const RopeFrequencies frequencies = rope_frequencies(rope, 16, 256, 256);
  std::vector<float> cos(256 * 8), sin(256 * 8);
  std::vector<double> cos64(256 * 8), sin64(256 * 8);
  const Shape shape{256, 8};
  fill_rope_tables(TensorView(cos.data(), shape), TensorView(sin.data(), shape), frequencies,
                   RopePrecision::exact);
  fill_rope_tables(TensorView(cos64.data(), shape), TensorView(sin64.data(), shape), frequencies,
                   RopePrecision::exact);
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double angle = static_cast<double>(i / 8) * frequencies.inverse_frequencies[i % 8];
    // A few double roundings.
    EXPECT_NEAR(cos64[i], std::cos(angle) * frequencies.attention_scaling, 1e-15);
    EXPECT_NEAR(sin64[i], std::sin(angle) * frequencies.attention_scaling, 1e-15);
    EXPECT_EQ(cos[i], static_cast<float>(cos64[i]));
    EXPECT_EQ(sin[i], static_cast<float>(sin64[i]));
  }
  EXPECT_NEAR(frequencies.attention_scaling, 0.1 * std::log(4.0) + 1.0, 1e-15);
}

TEST(Rope, HfTablesInFp64HoldTheFp32Values) {
  const RopeFrequencies frequencies = rope_frequencies({.theta = 500000.0}, 8, 1024, 1024);
  std::vector<float> cos(1024 * 4), sin(1024 * 4);
  std::vector<double> cos64(1024 * 4), sin64(1024 * 4);
  const Shape shape{1024, 4};
  fill_rope_tables(TensorView(cos.data(), shape), TensorView(sin.data(), shape), frequencies,
                   RopePrecision::hf);
  fill_rope_tables(TensorView(cos64.data(), shape), TensorView(sin64.data(), shape), frequencies,
                   RopePrecision::hf);
  EXPECT_EQ(cos64, std::vector<double>(cos.begin(), cos.end()));
  EXPECT_EQ(sin64, std::vector<double>(sin.begin(), sin.end()));
}

TEST(Rope, DynamicAndLongropeSwitchOneTokenBeyondTheOriginalLength) {
  const RopeSpec dynamic{.type = RopeType::dynamic, .factor = 2.0};
  EXPECT_EQ(rope_frequencies(dynamic, 8, 128, 1).inverse_frequencies,
            rope_frequencies(dynamic, 8, 128, 128).inverse_frequencies);
  EXPECT_NE(rope_frequencies(dynamic, 8, 128, 128).inverse_frequencies,
            rope_frequencies(dynamic, 8, 128, 129).inverse_frequencies);

  const RopeSpec longrope{.type = RopeType::longrope,
                          .original_max_position_embeddings = 128,
                          .short_factor = {1, 1, 1, 1},
                          .long_factor = {1, 2, 4, 8}};
  const auto up_to = rope_frequencies(longrope, 8, 1024, 128),
             beyond = rope_frequencies(longrope, 8, 1024, 129);
  EXPECT_EQ(up_to.inverse_frequencies[3], 8.0 * beyond.inverse_frequencies[3]);
  EXPECT_EQ(up_to.attention_scaling, beyond.attention_scaling);
}

void expect_refused(const RopeSpec& rope, const std::string& key, std::int64_t head_dim = 8,
                    std::int64_t max_positions = 128, std::int64_t length = 128) {
  try {
    rope_frequencies(rope, head_dim, max_positions, length);
    ADD_FAILURE() << key << " was not refused";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(key));
  }
}

TEST(Rope, RefusesValuesThatMakeNoSenseAndNamesTheKey) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double theta : {0.0, -1.0, nan}) expect_refused({.theta = theta}, "rope_theta");
  expect_refused({}, "head_dim", 7);
  expect_refused({}, "head_dim", 0);
  expect_refused({}, "max_position_embeddings", 8, 0);
  expect_refused({}, "sequence length", 8, 128, 0);
  expect_refused({.original_max_position_embeddings = -1}, "original_max_position_embeddings");
  for (const RopeType type : {RopeType::linear, RopeType::dynamic, RopeType::llama3}) {
    for (const double factor : {0.0, 0.5, -2.0, nan})
      expect_refused({.type = type, .factor = factor}, "factor");
  }
  for (const double factor : {0.5, -2.0, nan})
    expect_refused({.type = RopeType::yarn, .factor = factor}, "factor");
  expect_refused({.type = RopeType::dynamic, .factor = 2.0}, "head_dim", 2);
  expect_refused({.type = RopeType::llama3, .factor = 8.0, .low_freq_factor = 4.0}, "high_freq_factor");
  expect_refused({.type = RopeType::llama3, .factor = 8.0, .low_freq_factor = 0.0}, "low_freq_factor");
  expect_refused({.type = RopeType::yarn, .theta = 1.0, .factor = 4.0}, "rope_theta");
  expect_refused({.type = RopeType::yarn, .factor = 4.0, .beta_fast = 0.5}, "beta_fast");
  expect_refused({.type = RopeType::yarn, .factor = 4.0, .beta_slow = 0.0}, "beta_slow");
  expect_refused({.type = RopeType::yarn, .factor = 4.0, .attention_factor = -1.0}, "attention_factor");
  expect_refused({.type = RopeType::yarn, .factor = 4.0, .mscale = -1.0}, "mscale");
  expect_refused({.type = RopeType::yarn, .factor = 4.0, .mscale_all_dim = nan}, "mscale_all_dim");
}

TEST(Rope, RefusesLongropeFactorsOfTheWrongLengthOrSign) {
  const RopeSpec good{.type = RopeType::longrope,
                      .original_max_position_embeddings = 64,
                      .short_factor = {1, 1, 1, 1},
                      .long_factor = {1, 2, 4, 8}};
  EXPECT_NO_THROW(rope_frequencies(good, 8, 128, 128));
  RopeSpec rope = good;
  rope.short_factor.pop_back();
  expect_refused(rope, "short_factor");
  rope = good;
  rope.long_factor.push_back(1.0);
  expect_refused(rope, "long_factor");
  rope = good;
  rope.long_factor[2] = 0.0;
  expect_refused(rope, "long_factor[2]");
  rope = good;
  rope.original_max_position_embeddings = 1;
  expect_refused(rope, "original_max_position_embeddings");
}

TEST(Rope, ReachesThePositionsThatItsScalingWasMadeFor) {
  EXPECT_EQ(rope_positions({}, 32768), 32768);
  // Qwen2.5 with yarn: max_position_embeddings stays what the model had.
  EXPECT_EQ(rope_positions({.type = RopeType::yarn, .factor = 4.0, .original_max_position_embeddings = 32768},
                           32768),
            131072);
  EXPECT_EQ(rope_positions({.type = RopeType::linear, .factor = 2.0}, 4096), 8192);
  // Llama 3.1: it is what scaling has reached already.
  EXPECT_EQ(rope_positions(
                {.type = RopeType::llama3, .factor = 8.0, .original_max_position_embeddings = 8192}, 131072),
            131072);
}

TEST(Rope, TablesOfTheWrongShapeOrTypeBreakTheContract) {
  const RopeFrequencies frequencies = rope_frequencies({}, 8, 16, 16);
  std::vector<float> cos(16 * 4), sin(16 * 4);
  std::vector<bf16> half(16 * 4);
  const TensorView good(cos.data(), Shape{16, 4});
  const auto fill = [&](TensorView c, TensorView s) {
    fill_rope_tables(c, s, frequencies, RopePrecision::exact);
  };
  EXPECT_NO_THROW(fill(good, TensorView(sin.data(), Shape{16, 4})));
  EXPECT_THROW(fill(good, TensorView(sin.data(), Shape{15, 4})), ContractError);
  EXPECT_THROW(fill(TensorView(cos.data(), Shape{32, 2}), TensorView(sin.data(), Shape{32, 2})),
               ContractError);
  EXPECT_THROW(fill(TensorView(half.data(), Shape{16, 4}), TensorView(half.data(), Shape{16, 4})),
               ContractError);
}

}  // namespace
}  // namespace layerstream
