#include "engine/lr_schedule.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core/error.hpp"

namespace layerstream {
namespace {

// The values below were made by transformers 5.24.0 with:
//   import torch, transformers as t
//   o = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
//   s = t.get_cosine_schedule_with_warmup(o, num_warmup_steps=3, num_training_steps=10)  # linear, constant
//   alike for _ in range(12): print(repr(s.get_last_lr()[0])); o.step(); s.step()
void expect_rates(const LrSchedule& schedule, const std::vector<double>& expected) {
  for (std::size_t step = 0; step < expected.size(); ++step) {
    // The same double operations in the same order; only cos() may come from another libm, which is
    // good to 1 ulp of a factor in [0, 1]: 3e-4 * 2^-52.
    EXPECT_NEAR(schedule.at(static_cast<std::int64_t>(step)), expected[step], 3e-4 * 2.3e-16)
        << "step " << step;
  }
}

constexpr double rate = 3e-4;

TEST(LrSchedule, ConstantRisesThenStays) {
  expect_rates(LrSchedule(SchedulerType::constant, rate, 3, 6),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.0003, 0.0003, 0.0003, 0.0003});
}

TEST(LrSchedule, ConstantWithoutWarmupIsTheRateFromTheFirstStep) {
  expect_rates(LrSchedule(SchedulerType::constant, rate, 0, 2), {0.0003, 0.0003, 0.0003});
}

TEST(LrSchedule, LinearFallsToZeroAtTheLastStepAndStaysThere) {
  expect_rates(LrSchedule(SchedulerType::linear, rate, 0, 10),
               {0.0003, 0.00027, 0.00023999999999999998, 0.00020999999999999998, 0.00017999999999999998,
                0.00015, 0.00011999999999999999, 8.999999999999999e-05, 5.9999999999999995e-05,
                2.9999999999999997e-05, 0.0, 0.0});
}

TEST(LrSchedule, LinearWithWarmupMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::linear, rate, 3, 10),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.0002571428571428571,
                0.00021428571428571427, 0.0001714285714285714, 0.00012857142857142855, 8.57142857142857e-05,
                4.285714285714285e-05, 0.0, 0.0});
}

TEST(LrSchedule, CosineWithoutWarmupMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::cosine, rate, 0, 10),
               {0.0003, 0.00029265847744427303, 0.0002713525491562421, 0.00023816778784387094,
                0.0001963525491562421, 0.00015, 0.0001036474508437579, 6.183221215612904e-05,
                2.8647450843757897e-05, 7.34152255572697e-06, 0.0, 7.34152255572697e-06});
}

TEST(LrSchedule, CosineWithWarmupMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::cosine, rate, 3, 10),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.0002851453301853628,
                0.00024352347027881003, 0.00018337814009344714, 0.00011662185990655284,
                5.6476529721189974e-05, 1.4854669814637143e-05, 0.0, 1.4854669814637127e-05});
}

TEST(LrSchedule, WarmupLongerThanTheRunNeverDividesByZero) {
  for (const SchedulerType type : {SchedulerType::constant, SchedulerType::linear, SchedulerType::cosine}) {
    const LrSchedule schedule(type, rate, 20, 10);
    EXPECT_DOUBLE_EQ(schedule.at(10), rate / 2);
  }
}

TEST(LrSchedule, WarmupStepsBeatWarmupRatio) {
  RunConfig run;
  run.warmup_ratio = 0.5;
  run.warmup_steps = 3;
  EXPECT_EQ(LrSchedule::of(run, 10).warmup_steps(), 3);
}

TEST(LrSchedule, WarmupRatioRoundsUp) {
  RunConfig run;
  run.warmup_ratio = 0.03;
  EXPECT_EQ(LrSchedule::of(run, 101).warmup_steps(), 4);  // math.ceil(101 * 0.03)
  run.warmup_ratio = 0.1;
  EXPECT_EQ(LrSchedule::of(run, 100).warmup_steps(), 10);
}

TEST(LrSchedule, ANegativeStepIsABug) {
  EXPECT_THROW(LrSchedule(SchedulerType::linear, rate, 0, 10).at(-1), ContractError);
}

}  // namespace
}  // namespace layerstream
