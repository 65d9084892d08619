#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// Hyperparameters of one AdamW step, in the optimizer's double precision.
struct AdamWSettings {
  double learning_rate = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double gradient_scale = 1.0;  ///< s: the clip scale
  std::int64_t step = 1;        ///< t, from 1
};

/// The settings for parameters of another decay: norm weights and biases have none.
inline AdamWSettings with_decay(AdamWSettings settings, double weight_decay) {
  settings.weight_decay = weight_decay;
  return settings;
}

/// What the kernel multiplies with: computed once in double, rounded once to FP32. b1 and b2 are the FP32
/// betas in all of them, so that the moments' weights sum to what the bias corrections say.
struct AdamWScalars {
  float gradient_scale;  ///< s
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float sqrt_bias_correction2;  ///< sqrt(1 − b2^t)
  float eps;
  float minus_decay;      ///< −lr · wd
  float minus_step_size;  ///< −lr / (1 − b1^t)
};
/// Throws ContractError for a step below 1.
AdamWScalars adamw_scalars(const AdamWSettings& settings);

/// A run of split-master parameters with their state; all arrays have n elements.
struct AdamWSlice {
  bf16* hi;
  std::int16_t* lo;
  float* exp_avg;
  float* exp_avg_sq;
  const float* gradient;
  std::int64_t n;
};

/// Elements [begin, end) of a slice; a slice without a gradient has none in it either.
inline AdamWSlice elements(const AdamWSlice& slice, std::int64_t begin, std::int64_t end) {
  return {.hi = slice.hi + begin,
          .lo = slice.lo + begin,
          .exp_avg = slice.exp_avg + begin,
          .exp_avg_sq = slice.exp_avg_sq + begin,
          .gradient = slice.gradient == nullptr ? nullptr : slice.gradient + begin,
          .n = end - begin};
}

/// One AdamW step (Loshchilov & Hutter, 2019), in place, in exactly this order of IEEE operations:
///   g' = s·g;  m = fma(b1, m, (1−b1)·g');  v = fma(b2, v, (1−b2)·(g'·g'));
///   d = sqrt(v) / sqrt(1−b2^t) + eps;  p = p + fma(−lr·wd, p, (−lr/(1−b1^t)) · (m / d))
/// so that every instruction set, thread count and device gives the same bits. The weight is rounded once:
/// rounded after the decay too, it would lose up to half an ulp each step, always to the same side (all
/// of the decay when lr·wd < 2^-25; 2e-5 of the weights in 1,000 steps of lr 1e-5, wd 0.01).
/// NaNs come out as NaNs; which payload, when several meet, is up to the instruction set. Runs on the
/// calling thread with the best instruction set the CPU has.
void adamw_host(const AdamWSlice& slice, const AdamWScalars& scalars);

/// The same formula in plain scalar C++ with std::fma: the reference of the tests.
void adamw_reference(const AdamWSlice& slice, const AdamWScalars& scalars);

/// The same step for a slice in device memory, ordered on the context's stream, with the same bits. The first
/// `num_leading` elements take `leading`, the others `trailing`: what differs is the decay.
/// Fastest where the arrays are 16-byte aligned. In a CPU build it is adamw_host on
/// the calling thread.
/// @param thread_blocks so many at most, each of which fills half a multiprocessor: for state in host memory,
/// which few blocks read and write faster than many (benches/results); 0: all that the device takes. Throws
/// ContractError unless 0 <= num_leading <= n and thread_blocks >= 0.
void adamw_device(const Context& context, const AdamWSlice& slice, std::int64_t num_leading,
                  const AdamWScalars& leading, const AdamWScalars& trailing, int thread_blocks = 0);

/// Name of the instruction set that adamw_host uses on this CPU ("AVX3", "AVX2", "NEON", "scalar").
std::string adamw_host_target();

/// Instruction sets that were compiled and that this CPU can run, best first; `adamw_host_on` runs one
/// of them by name (tests, benchmarks). Throws ContractError for an unknown name.
std::vector<std::string> adamw_host_targets();
void adamw_host_on(const std::string& target, const AdamWSlice& slice, const AdamWScalars& scalars);

}  // namespace layerstream::ops
