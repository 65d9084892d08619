#include "ops/adamw.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.hpp"

// One algorithm, compiled once per instruction set by foreach_target.h, the best one chosen when first
// called. Only sets with a true fused multiply-add and IEEE division and square root are compiled: the
// emulated MulAdd of the older ones rounds twice. What is left runs adamw_reference. AVX3_DL adds nothing
// that is used here.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_PPC8 | HWY_WASM | HWY_WASM_EMU256 | HWY_RVV)
// Without this, -march=native drops every set below the machine's own, and nothing could compare them.
#define HWY_COMPILE_ALL_ATTAINABLE
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/adamw.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace layerstream::ops::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

void update(const AdamWSlice& slice, const AdamWScalars& scalars) {
  adamw_reference(slice, scalars);
}

#else

namespace hn = hwy::HWY_NAMESPACE;
static_assert(HWY_NATIVE_FMA, "an emulated fused multiply-add rounds twice");

/// One vector of parameters at `i`; the order of operations is that of the header.
template <class D, class V = hn::Vec<D> >
HWY_INLINE void update_vector(D d, const AdamWSlice& slice, const AdamWScalars& s, std::size_t i) {
  const hn::RebindToUnsigned<D> du32;
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<std::uint16_t, D> du16;
  const hn::Rebind<std::int16_t, D> di16;
  auto* HWY_RESTRICT hi = reinterpret_cast<std::uint16_t*>(slice.hi) + i;
  std::int16_t* HWY_RESTRICT lo = slice.lo + i;
  float* HWY_RESTRICT exp_avg = slice.exp_avg + i;
  float* HWY_RESTRICT exp_avg_sq = slice.exp_avg_sq + i;

  const V gradient = hn::Mul(hn::Set(d, s.gradient_scale), hn::LoadU(d, slice.gradient + i));
  const V m = hn::MulAdd(hn::Set(d, s.beta1), hn::LoadU(d, exp_avg),
                         hn::Mul(hn::Set(d, s.one_minus_beta1), gradient));
  const V v = hn::MulAdd(hn::Set(d, s.beta2), hn::LoadU(d, exp_avg_sq),
                         hn::Mul(hn::Set(d, s.one_minus_beta2), hn::Mul(gradient, gradient)));
  const V denominator = hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, s.sqrt_bias_correction2)), hn::Set(d, s.eps));

  const auto high = hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, hi)));
  const auto low = hn::BitCast(du32, hn::PromoteTo(di32, hn::LoadU(di16, lo)));
  const V old = hn::BitCast(d, hn::Add(high, low));
  const V step = hn::Mul(hn::Set(d, s.minus_step_size), hn::Div(m, denominator));
  const V p = hn::Add(old, hn::MulAdd(hn::Set(d, s.minus_decay), old, step));

  // hi = (bits + 0x8000) >> 16; lo = int16(bits − (hi << 16)), which is the low half of bits.
  const auto bits = hn::BitCast(du32, p);
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Set(du32, 0x8000u)));
  hn::StoreU(hn::TruncateTo(du16, rounded), du16, hi);
  hn::StoreU(hn::BitCast(di16, hn::TruncateTo(du16, bits)), di16, lo);
  hn::StoreU(m, d, exp_avg);
  hn::StoreU(v, d, exp_avg_sq);
}

void update(const AdamWSlice& slice, const AdamWScalars& scalars) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t n = static_cast<std::size_t>(slice.n);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) update_vector(d, slice, scalars, i);
  adamw_reference({slice.hi + i, slice.lo + i, slice.exp_avg + i, slice.exp_avg_sq + i, slice.gradient + i,
                   static_cast<std::int64_t>(n - i)},
                  scalars);
}

#endif

}  // namespace layerstream::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace layerstream::ops {
namespace {

struct Target {
  std::int64_t bit;
  void (*update)(const AdamWSlice&, const AdamWScalars&);  // null: not compiled
};

// Best first, as Highway orders them.
constexpr std::array targets{
    Target{HWY_AVX3, HWY_CHOOSE_AVX3(update)},         Target{HWY_AVX2, HWY_CHOOSE_AVX2(update)},
    Target{HWY_SVE2_128, HWY_CHOOSE_SVE2_128(update)}, Target{HWY_SVE_256, HWY_CHOOSE_SVE_256(update)},
    Target{HWY_SVE2, HWY_CHOOSE_SVE2(update)},         Target{HWY_SVE, HWY_CHOOSE_SVE(update)},
    Target{HWY_NEON, HWY_CHOOSE_NEON(update)},
};
constexpr std::string_view scalar_target = "scalar";

bool can_run(const Target& target) {
  return target.update != nullptr && (hwy::SupportedTargets() & target.bit) != 0;
}

/// Null when only the scalar code can run.
const Target* best_target() {
  const auto best = std::find_if(targets.begin(), targets.end(), can_run);
  return best == targets.end() ? nullptr : &*best;
}

void expect_valid(const AdamWSlice& slice) {
  LAYERSTREAM_EXPECT(slice.n >= 0, "an AdamW slice of {} parameters", slice.n);
}

}  // namespace

AdamWScalars adamw_scalars(const AdamWSettings& settings) {
  LAYERSTREAM_EXPECT(settings.step >= 1, "AdamW step {}; steps count from 1", settings.step);
  // The complements and the bias corrections are those of the rounded betas: 1 − fl(0.999) is 1.3e-5
  // less than 0.001, and a moment decayed with the one but corrected with the other is off by as much.
  const float beta1 = static_cast<float>(settings.beta1);
  const float beta2 = static_cast<float>(settings.beta2);
  const double t = static_cast<double>(settings.step);
  const double bias_correction1 = 1.0 - std::pow(static_cast<double>(beta1), t);
  const double bias_correction2 = 1.0 - std::pow(static_cast<double>(beta2), t);
  return {.gradient_scale = static_cast<float>(settings.gradient_scale),
          .beta1 = beta1,
          .one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(beta1)),
          .beta2 = beta2,
          .one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(beta2)),
          .sqrt_bias_correction2 = static_cast<float>(std::sqrt(bias_correction2)),
          .eps = static_cast<float>(settings.eps),
          .minus_decay = static_cast<float>(-settings.learning_rate * settings.weight_decay),
          .minus_step_size = static_cast<float>(-settings.learning_rate / bias_correction1)};
}

void adamw_reference(const AdamWSlice& slice, const AdamWScalars& s) {
  for (std::int64_t i = 0; i < slice.n; ++i) {
    const float gradient = s.gradient_scale * slice.gradient[i];
    const float m = std::fma(s.beta1, slice.exp_avg[i], s.one_minus_beta1 * gradient);
    const float v = std::fma(s.beta2, slice.exp_avg_sq[i], s.one_minus_beta2 * (gradient * gradient));
    const float denominator = std::sqrt(v) / s.sqrt_bias_correction2 + s.eps;
    const float old = merge(slice.hi[i], slice.lo[i]);
    const float step = s.minus_step_size * (m / denominator);
    const float p = old + std::fma(s.minus_decay, old, step);
    const SplitFloat halves = split(p);
    slice.hi[i] = halves.hi;
    slice.lo[i] = halves.lo;
    slice.exp_avg[i] = m;
    slice.exp_avg_sq[i] = v;
  }
}

void adamw_host(const AdamWSlice& slice, const AdamWScalars& scalars) {
  static const Target* const best = best_target();
  expect_valid(slice);
  if (best == nullptr) {
    adamw_reference(slice, scalars);
  } else {
    best->update(slice, scalars);
  }
}

std::string adamw_host_target() {
  return adamw_host_targets().front();
}

std::vector<std::string> adamw_host_targets() {
  std::vector<std::string> names;
  for (const Target& target : targets) {
    if (can_run(target)) names.emplace_back(hwy::TargetName(target.bit));
  }
  names.emplace_back(scalar_target);
  return names;
}

void adamw_host_on(const std::string& name, const AdamWSlice& slice, const AdamWScalars& scalars) {
  expect_valid(slice);
  if (name == scalar_target) return adamw_reference(slice, scalars);
  for (const Target& target : targets) {
    if (can_run(target) && name == hwy::TargetName(target.bit)) return target.update(slice, scalars);
  }
  throw ContractError(fmt::format("AdamW has no instruction set {}; this CPU runs {}", name,
                                  fmt::join(adamw_host_targets(), ", ")));
}

}  // namespace layerstream::ops
#endif  // HWY_ONCE
