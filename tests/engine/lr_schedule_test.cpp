#include "engine/lr_schedule.hpp"

#include <gmock/gmock.h>
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
// Those of schedules with kwargs by the get_scheduler() of the same version, which was given the kwargs that
// the test names, num_warmup_steps and num_training_steps, with the product of the rate and of the
// function that it hands to LambdaLR.
void expect_rates(const LrSchedule& schedule, const std::vector<double>& expected) {
  for (std::size_t step = 0; step < expected.size(); ++step) {
    // The same double operations in the same order; only cos() and pow() may come from another libm, which
    // is good to 1 ulp of a factor in [0, 1]: 3e-4 * 2^-52.
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

TEST(LrSchedule, ConstantWithWarmupMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::constant_with_warmup, rate, 3, 6),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.0003, 0.0003, 0.0003, 0.0003});
}

TEST(LrSchedule, CosineOfThreeHalfCyclesMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::cosine, rate, 3, 10, {.num_cycles = 1.5}),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00018337814009344714,
                1.4854669814637143e-05, 5.647652972118994e-05, 0.00024352347027880997, 0.0002851453301853629,
                0.00011662185990655287, 0.0, 0.00011662185990655278});
}

TEST(LrSchedule, CosineWithOneRestartFallsOnceAndStaysAtZero) {
  expect_rates(LrSchedule(SchedulerType::cosine_with_restarts, rate, 3, 10),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.0002851453301853628,
                0.00024352347027881003, 0.00018337814009344714, 0.00011662185990655284,
                5.6476529721189974e-05, 1.4854669814637143e-05, 0.0, 0.0});
}

TEST(LrSchedule, CosineWithThreeRestartsMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::cosine_with_restarts, rate, 3, 10, {.num_cycles = 3}),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00018337814009344714,
                1.4854669814637143e-05, 0.00024352347027881005, 5.647652972119002e-05, 0.0002851453301853629,
                0.00011662185990655297, 0.0, 0.0});
}

TEST(LrSchedule, CosineWithMinLrMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::cosine_with_min_lr, rate, 3, 10, {.min_lr = 3e-5}),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00028663079716682654,
                0.000249171123250929, 0.0001950403260841024, 0.00013495967391589757, 8.082887674907099e-05,
                4.336920283317343e-05, 2.9999999999999997e-05, 4.336920283317342e-05});
}

TEST(LrSchedule, CosineWithMinLrRateAndAWholeCycleMatchesTransformers) {
  expect_rates(
      LrSchedule(SchedulerType::cosine_with_min_lr, rate, 3, 10, {.num_cycles = 1, .min_lr_rate = 0.25}),
      {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00025764260270910754,
       0.00016246639492991462, 8.614100236097786e-05, 8.614100236097783e-05, 0.0001624663949299146,
       0.0002576426027091075, 0.0003, 0.00025764260270910754});
}

TEST(LrSchedule, PolynomialByDefaultFallsLinearlyTo1e7) {
  expect_rates(LrSchedule(SchedulerType::polynomial, rate, 3, 10),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00025715714285714283,
                0.0002143142857142857, 0.00017147142857142856, 0.00012862857142857141, 8.578571428571428e-05,
                4.294285714285716e-05, 9.999999999999998e-08, 9.999999999999998e-08});
}

TEST(LrSchedule, PolynomialWithPowerAndEndMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::polynomial, rate, 3, 10, {.power = 2.5, .lr_end = 1e-5}),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00020725636411480483,
                0.0001350483336077907, 8.158184305154341e-05, 4.487032817444531e-05, 2.2654001657894376e-05,
                1.2236932595360735e-05, 1e-05, 1e-05});
}

TEST(LrSchedule, InverseSqrtTakesTheWarmupForItsTimescale) {
  expect_rates(LrSchedule(SchedulerType::inverse_sqrt, rate, 3, 10),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00025980762113533157,
                0.000232379000772445, 0.00021213203435596422, 0.00019639610121239312, 0.0001837117307087383,
                0.00017320508075688773, 0.0001643167672515498, 0.00015666989036012803});
}

TEST(LrSchedule, InverseSqrtWithoutWarmupHasATimescaleOf10000) {
  expect_rates(
      LrSchedule(SchedulerType::inverse_sqrt, rate, 0, 10),
      {0.0003, 0.0002999850011249063, 0.00029997000449925014, 0.0002999550101224694, 0.0002999400179940021,
       0.0002999250281132863, 0.00029991004047976057, 0.00029989505509286343, 0.00029988007195203356,
       0.00029986509105671004, 0.0002998501124063319, 0.00029983513600033874});
}

TEST(LrSchedule, InverseSqrtWithATimescaleMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::inverse_sqrt, rate, 3, 10, {.timescale = 7}),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00028062430400804556,
                0.00026457513110645904, 0.00025099800796022265, 0.00023931721056523968, 0.000229128784747792,
                0.00022013981571160284, 0.00021213203435596422, 0.00020493901531919194});
}

TEST(LrSchedule, WarmupStableDecayFillsTheRun) {
  expect_rates(LrSchedule(SchedulerType::warmup_stable_decay, rate, 3, 12, {.num_decay_steps = 4}),
               {0.0, 9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.0003, 0.0003, 0.0003, 0.0003,
                0.0003, 0.00025606601717798207, 0.00015, 4.3933982822017876e-05, 0.0, 0.0});
}

TEST(LrSchedule, WarmupStableDecayInStraightLinesMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::warmup_stable_decay, rate, 3, 12,
                          {.num_decay_steps = 4, .min_lr_ratio = 0.1, .decay_type = LrCurve::linear}),
               {2.9999999999999997e-05, 0.00011999999999999999, 0.00020999999999999998, 0.0003, 0.0003,
                0.0003, 0.0003, 0.0003, 0.0003, 0.00023249999999999999, 0.000165, 9.75e-05,
                2.9999999999999997e-05, 2.9999999999999997e-05});
}

TEST(LrSchedule, WarmupStableDecayAlongSquareRootsMatchesTransformers) {
  expect_rates(LrSchedule(SchedulerType::warmup_stable_decay, rate, 3, 12,
                          {.num_decay_steps = 4,
                           .min_lr_ratio = 0.1,
                           .warmup_type = LrCurve::one_minus_sqrt,
                           .decay_type = LrCurve::one_minus_sqrt}),
               {2.9999999999999997e-05, 7.954592314951396e-05, 0.000144115427318801, 0.0003, 0.0003, 0.0003,
                0.0003, 0.0003, 0.0003, 0.000165, 0.00010908116907963214, 6.617314097820157e-05,
                2.9999999999999997e-05, 2.9999999999999997e-05});
}

TEST(LrSchedule, WarmupStableDecayThatEndsBeforeTheRunStaysAtItsMinimum) {
  expect_rates(
      LrSchedule(
          SchedulerType::warmup_stable_decay, rate, 3, 12,
          {.num_cycles = 1.5, .num_stable_steps = 2, .num_decay_steps = 4, .warmup_type = LrCurve::cosine}),
      {0.0, 7.499999999999998e-05, 0.00022499999999999994, 0.0003, 0.0003, 0.0003, 4.3933982822017876e-05,
       0.00014999999999999996, 0.0002560660171779821, 0.0, 0.0, 0.0, 0.0, 0.0});
}

TEST(LrSchedule, ADecayOfNoStepsIsALastStableStep) {
  const LrSchedule schedule(SchedulerType::warmup_stable_decay, rate, 0, 4,
                            {.num_decay_steps = 0, .min_lr_ratio = 0.5});
  EXPECT_EQ(schedule.at(3), rate);
  EXPECT_EQ(schedule.at(4), rate / 2);
}

TEST(LrSchedule, OfARunHandsOnTheKwargs) {
  RunConfig run;
  run.learning_rate = rate;
  run.lr_scheduler_type = SchedulerType::warmup_stable_decay;
  run.warmup_steps = 2;
  run.lr_scheduler_kwargs = {.num_decay_steps = 4, .min_lr_ratio = 0.5, .decay_type = LrCurve::linear};
  const LrSchedule schedule = LrSchedule::of(run, 10);
  EXPECT_EQ(schedule.at(0), rate / 2);
  EXPECT_EQ(schedule.at(6), rate);
  EXPECT_EQ(schedule.at(8), rate * 0.75);  // 1 - 2/4 of the way to the half
  EXPECT_EQ(schedule.at(10), rate / 2);
}

TEST(LrSchedule, AWarmupAndDecayLongerThanTheRunAreRefused) {
  RunConfig run;
  run.lr_scheduler_type = SchedulerType::warmup_stable_decay;
  run.warmup_ratio = 0.5;
  run.lr_scheduler_kwargs.num_decay_steps = 5;
  EXPECT_NO_THROW((void)LrSchedule::of(run, 10));
  run.lr_scheduler_kwargs.num_decay_steps = 6;
  try {
    (void)LrSchedule::of(run, 10);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("5 steps of warm-up and 6 of decay"));
  }
  run.lr_scheduler_kwargs.num_stable_steps = 2;  // a run that stops within its decay
  EXPECT_NO_THROW((void)LrSchedule::of(run, 10));
}

TEST(LrSchedule, AScheduleWithoutWhatItNeedsIsABug) {
  EXPECT_THROW(LrSchedule(SchedulerType::cosine_with_min_lr, rate, 0, 10), ContractError);
  EXPECT_THROW(LrSchedule(SchedulerType::warmup_stable_decay, rate, 0, 10), ContractError);
}

TEST(LrSchedule, WarmupLongerThanTheRunNeverDividesByZero) {
  for (const SchedulerType type :
       {SchedulerType::constant, SchedulerType::constant_with_warmup, SchedulerType::linear,
        SchedulerType::cosine, SchedulerType::cosine_with_restarts, SchedulerType::polynomial,
        SchedulerType::inverse_sqrt}) {
    const LrSchedule schedule(type, rate, 20, 10);
    EXPECT_DOUBLE_EQ(schedule.at(10), rate / 2);
  }
}

TEST(LrSchedule, PolynomialWithNothingLeftToDecayIsAtItsEnd) {
  EXPECT_DOUBLE_EQ(LrSchedule(SchedulerType::polynomial, rate, 10, 10).at(10), default_lr_end);
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
