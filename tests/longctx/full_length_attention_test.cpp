// Attention of a row of half a million tokens as the engine computes it, chunk by chunk, against FP64 sums
// for sampled queries and keys. Past 2^31 elements an index that wraps reads finite numbers of another place,
// so nothing less than the right numbers is a proof. The same code at a small size runs in every build.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ops/attention.hpp"
#include "tests/longctx/sampled_attention.hpp"
#include "tests/ops/ops_test.hpp"
#include "tests/support/test_device.hpp"

namespace layerstream::test {
namespace {

struct Problem {
  std::string name;
  std::int64_t heads, key_heads, head_dim;
  std::int64_t tokens, chunk_tokens;
  DType dtype = DType::bf16;
  bool deterministic = true;

  /// Scores have this standard deviation: of 524,288 keys about a thousand share a query's attention.
  static constexpr double score_deviation = 2.5;
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(head_dim)); }
  Shape query_shape() const { return {tokens, heads, head_dim}; }
  Shape key_shape() const { return {tokens, key_heads, head_dim}; }
  std::int64_t num_chunks() const { return (tokens + chunk_tokens - 1) / chunk_tokens; }
  std::int64_t last_chunk() const { return (num_chunks() - 1) * chunk_tokens; }
  ops::AttentionLimits limits() const {
    return {.num_attention_heads = heads,
            .num_key_value_heads = key_heads,
            .head_dim = head_dim,
            .compute = dtype,
            .queries = chunk_tokens,
            .keys = tokens,
            .deterministic = deterministic};
  }
};

void PrintTo(const Problem& problem, std::ostream* out) {
  *out << problem.name;
}

std::string name_of_problem(const ::testing::TestParamInfo<Problem>& info) {
  return info.param.name;
}

/// Everything of one row, in device memory.
struct RowTensors {
  RowTensors(const Problem& problem, Arena& arena)
      : q(arena.tensor(problem.dtype, problem.query_shape(), "row")),
        dout(arena.tensor(problem.dtype, problem.query_shape(), "row")),
        o(arena.tensor(problem.dtype, problem.query_shape(), "row")),
        dq(arena.tensor(problem.dtype, problem.query_shape(), "row")),
        k(arena.tensor(problem.dtype, problem.key_shape(), "row")),
        v(arena.tensor(problem.dtype, problem.key_shape(), "row")),
        lse(arena.tensor(accumulator_of(problem.dtype), {problem.tokens, problem.heads}, "row")),
        dk(arena.tensor(accumulator_of(problem.dtype), problem.key_shape(), "row")),
        dv(arena.tensor(accumulator_of(problem.dtype), problem.key_shape(), "row")),
        workspace(arena.tensor(
            DType::u8, {static_cast<std::int64_t>(ops::attention_workspace(problem.limits()))}, "workspace")),
        sampler({.q = q, .k = k, .v = v, .dout = dout, .o = o, .lse = lse, .scale = problem.scale()}, arena) {
  }

  TensorView q, dout, o, dq, k, v, lse, dk, dv, workspace;
  AttentionSampler sampler;
};

/// 64 rows, a function of the problem: the ends of the row and of chunks, those around multiples of 2^31
/// elements, some of the last chunk, and random ones.
std::vector<std::int64_t> sampled_rows(const Problem& problem, std::uint64_t seed) {
  std::set<std::int64_t> rows{0, problem.tokens - 1};
  const auto add = [&](std::int64_t row) {
    if (row >= 0 && row < problem.tokens) rows.insert(row);
  };
  for (const std::int64_t chunk : {std::int64_t{1}, problem.num_chunks() / 2, problem.num_chunks() - 1}) {
    add(chunk * problem.chunk_tokens - 1);
    add(chunk * problem.chunk_tokens);
  }
  for (const std::int64_t row_elements :
       {problem.heads * problem.head_dim, problem.key_heads * problem.head_dim}) {
    for (const int exponent : {29, 30, 31}) {  // 2^31 bytes in bf16 are 2^30 elements
      const std::int64_t row = (std::int64_t{1} << exponent) / row_elements;
      for (const std::int64_t near : {row - 1, row, row + 1}) add(near);
    }
  }
  constexpr std::size_t wanted = 64;
  std::uint64_t index = 0;
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(uniform_at(seed, 2, index++) * static_cast<double>(limit));
  };
  while (rows.size() < wanted) {
    add(below(problem.tokens));
    if (rows.size() < wanted) add(problem.last_chunk() + below(problem.tokens - problem.last_chunk()));
  }
  return {rows.begin(), rows.end()};
}

/// An error in units of the bound on it, and where it is. At the worst element of what was looked at.
struct Worst {
  double ratio = 0.0, error = 0.0;
  std::int64_t row = 0, element = 0;

  void note(const Worst& other) {
    if (!(other.ratio <= ratio) && !std::isnan(ratio)) *this = other;  // lets NaN in, and not out
  }
};

/// What rounding may do to results. Bounds by what is known of independent errors: a sum of them stays within
/// λ roots of the sum of their squares with probability 1 − 2 exp(−λ²/2) (Higham and Mary, "A new approach to
/// probabilistic rounding error analysis", 2019). With λ = 6 less than one number in 10^7 is out of bounds.
class Bounds {
 public:
  explicit Bounds(const Problem& problem)
      : arithmetic_(problem.dtype == DType::f64 ? 2.0 * 0x1p-53 : fp32_roundoff),
        storage_(problem.dtype == DType::bf16 ? bf16_roundoff : 0.0),
        inner_(ops::attention_rounds_products(problem.head_dim, problem.dtype) ? bf16_roundoff : 0.0) {
    // Uniform numbers are at most √3 of their deviation. A score errs by d + 3 roundoffs of its magnitude,
    // and exp makes that the relative error of a probability; dout · v and D err by d + 4.
    const double d = static_cast<double>(problem.head_dim);
    const double largest_score = 3.0 * problem.scale() * d * Problem::score_deviation;
    pair_ = arithmetic_ * ((d + 3.0) * largest_score + d + 7.0);
    // Sums over keys, or over the queries and the heads of a group.
    sum_ = roots * arithmetic_ *
           std::sqrt(static_cast<double>(problem.tokens * (problem.heads / problem.key_heads)));
  }

  /// @param stored whether the result is in the compute dtype, and not in the accumulator dtype
  /// @param total what probabilities add up to, of each head, by which the sums are to be divided; or null
  Worst worst(std::int64_t row, const OwnedTensor& actual, const SampledSums& expected, bool stored,
              const OwnedTensor* total = nullptr) const {
    Worst result;
    for (std::int64_t i = 0; i < expected.value.numel(); ++i) {
      const double divisor = total == nullptr ? 1.0 : (*total)[i / expected.value.shape()[1]];
      const double value = expected.value[i] / divisor, spread = expected.spread[i] / divisor,
                   size = expected.size[i] / divisor;
      // Of each summand its pair's error, and two roundings: P or dS, and the part of dq of a block of keys,
      // or of dk and dv of a head or a group. Partial sums stay within four spreads. What all summands share,
      // the error of lse or of the total, is relative to their sum.
      const double bound = (roots * pair_ + 4.0 * sum_) * size + roots * 2.0 * inner_ * spread +
                           (pair_ + sum_ + (stored ? storage_ : 0.0)) * std::fabs(value);
      result.note(ratio(actual[i] - value, bound, row, i));
    }
    return result;
  }

  Worst worst_lse(std::int64_t row, const OwnedTensor& lse, const OwnedTensor& total) const {
    Worst result;
    for (std::int64_t h = 0; h < total.numel(); ++h) {
      result.note(ratio(std::log(total[h]), pair_ + sum_ + arithmetic_ * std::fabs(lse[h]), row, h));
    }
    return result;
  }

 private:
  static constexpr double roots = 6.0;

  static Worst ratio(double error, double bound, std::int64_t row, std::int64_t element) {
    return {error == 0.0 ? 0.0 : std::fabs(error) / bound, std::fabs(error), row, element};
  }

  double arithmetic_, storage_, inner_, pair_ = 0.0, sum_ = 0.0;
};

class FullLengthAttention : public ::testing::TestWithParam<Problem> {
 protected:
  FullLengthAttention() {
    Ledger planned, used;
    Arena dry = Arena::dry(Space::device, planned);
    const RowTensors counted(problem_, dry);
    device_ = make_test_device(dry.used());
    region_ = device_->allocate(dry.used());
    Arena arena(Space::device, region_->data(), region_->bytes(), used);
    tensors_ = std::make_unique<RowTensors>(problem_, arena);
    context_ = {.stream = StreamView::host(),
                .workspace = tensors_->workspace.data(),
                .workspace_bytes = tensors_->workspace.bytes(),
                .libraries = shared_libraries()};
    device_->poison(region_->data(), region_->bytes(), context_.stream);
    fill_uniform(context_, tensors_->q, 1, Problem::score_deviation);
    fill_uniform(context_, tensors_->k, 2, 1.0);
    fill_uniform(context_, tensors_->v, 3, 1.0);
    fill_uniform(context_, tensors_->dout, 4, 1.0);
  }

  /// Calls function(first row, rows, segments) for a chunk, which sees all keys so far.
  template <class Function>
  void with_chunk(std::int64_t chunk, const Function& function) {
    const std::int64_t begin = chunk * problem_.chunk_tokens;
    const std::int64_t rows = std::min(problem_.chunk_tokens, problem_.tokens - begin);
    const ops::AttentionSegment segment{
        .first_query = 0, .num_queries = rows, .first_key = 0, .num_keys = begin + rows};
    function(begin, rows, std::span(&segment, 1));
  }

  void forward() {
    const RowTensors& t = *tensors_;
    for (std::int64_t chunk = 0; chunk < problem_.num_chunks(); ++chunk) {
      with_chunk(chunk, [&](std::int64_t begin, std::int64_t rows, const auto& segments) {
        ops::attention_forward(context_,
                               {.o = t.o.rows(begin, rows),
                                .lse = t.lse.rows(begin, rows),
                                .q = t.q.rows(begin, rows),
                                .k = t.k.rows(0, begin + rows),
                                .v = t.v.rows(0, begin + rows)},
                               segments, settings());
      });
    }
  }

  void backward() {
    const RowTensors& t = *tensors_;
    for (std::int64_t chunk = problem_.num_chunks() - 1; chunk >= 0; --chunk) {
      with_chunk(chunk, [&](std::int64_t begin, std::int64_t rows, const auto& segments) {
        ops::attention_backward(context_,
                                {.dq = t.dq.rows(begin, rows),
                                 .dk = t.dk.rows(0, begin + rows),
                                 .dv = t.dv.rows(0, begin + rows),
                                 .dout = t.dout.rows(begin, rows),
                                 .q = t.q.rows(begin, rows),
                                 .k = t.k.rows(0, begin + rows),
                                 .v = t.v.rows(0, begin + rows),
                                 .o = t.o.rows(begin, rows),
                                 .lse = t.lse.rows(begin, rows),
                                 .accumulate = chunk + 1 < problem_.num_chunks()},
                                segments, settings());
      });
    }
  }

  void compare() {
    const RowTensors& t = *tensors_;
    const Bounds bounds(problem_);
    std::map<std::string, Worst> worst;
    t.sampler.prepare(context_);
    const auto check = [&](const std::string& what, std::int64_t row, const TensorView& tensor,
                           const SampledSums& expected, bool stored, const OwnedTensor* total = nullptr) {
      const auto against = [&](std::int64_t other) {
        return bounds.worst(row, widened(context_, tensor.rows(other, 1)), expected, stored, total);
      };
      worst[what].note(against(row));
      // The check can fail: the neighbouring row is out of bounds.
      EXPECT_GT(against(row == 0 ? 1 : row - 1).ratio, 1.0) << what << " of row " << row;
    };
    for (const std::int64_t row : sampled_rows(problem_, 11)) {
      const SampledQuery expected = t.sampler.query(context_, row);
      worst["lse"].note(bounds.worst_lse(row, widened(context_, t.lse.rows(row, 1)), expected.total));
      check("o", row, t.o, expected.o, true, &expected.total);
      check("dq", row, t.dq, expected.dq, true);
    }
    for (const std::int64_t row : sampled_rows(problem_, 12)) {
      const SampledKey expected = t.sampler.key(context_, row);
      check("dk", row, t.dk, expected.dk, false);
      check("dv", row, t.dv, expected.dv, false);
    }
    std::string line = problem_.name + ": worst error in units of its bound:";
    for (const auto& [what, where] : worst) {
      line += fmt::format(" {} {:.2f}", what, where.ratio);
      EXPECT_TRUE(where.ratio <= 1.0) << what << " of row " << where.row << ", element " << where.element
                                      << ": error " << where.error << ", bound " << where.error / where.ratio;
    }
    std::printf("%s\n", line.c_str());
  }

  /// Wall time of `work`, in seconds, the device's work included.
  template <class Work>
  static double seconds_of(const Work& work) {
    wait_for_device();
    const auto start = std::chrono::steady_clock::now();
    work();
    wait_for_device();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void check() {
    const double forward_seconds = seconds_of([&] { forward(); });
    const double backward_seconds = seconds_of([&] { backward(); });
    const double compare_seconds = seconds_of([&] { compare(); });
    std::printf(
        "%s: %lld tokens, %lld elements of q, %s of device memory; forward %.2f s, backward %.2f s, 64 queries "
        "and 64 keys in FP64 %.2f s\n",
        problem_.name.c_str(), static_cast<long long>(problem_.tokens),
        static_cast<long long>(tensors_->q.numel()), format_bytes(region_->bytes()).c_str(), forward_seconds,
        backward_seconds, compare_seconds);
  }

  const Problem& problem_ = GetParam();

 private:
  ops::AttentionSettings settings() const {
    return {.scale = problem_.scale(), .deterministic = problem_.deterministic};
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceRegion> region_;
  std::unique_ptr<RowTensors> tensors_;
  ops::Context context_{.stream = StreamView::host()};
};

TEST_P(FullLengthAttention, SampledRowsAreThoseOfFp64) {
  check();
}

std::vector<Problem> small_problems() {
  std::vector<Problem> all;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const std::int64_t tokens : {2048 - 24, 2048, 2048 + 24}) {
      all.push_back({fmt::format("{}_of_{}", name_of(dtype), tokens), 4, 2, 16, tokens, 256, dtype});
    }
  }
  all.push_back({"odd_chunks", 3, 1, 16, 1001, 37, DType::bf16});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Small, FullLengthAttention, ::testing::ValuesIn(small_problems()), name_of_problem);

#ifdef LAYERSTREAM_TEST_ON_GPU
constexpr std::int64_t half_million = 524'288;

/// Heads of Qwen2.5-7B: 1.88e9 elements of q.
Problem qwen(std::string name, std::int64_t tokens, bool deterministic = true) {
  return {std::move(name), 28, 4, 128, tokens, 8192, DType::bf16, deterministic};
}

// Heads of Llama-3.1-8B: the last chunk, of 128 tokens, begins at element 2^31 of q, o, dout and dq.
INSTANTIATE_TEST_SUITE_P(HalfAMillion, FullLengthAttention,
                         ::testing::Values(qwen("qwen_128_less", half_million - 128),
                                           qwen("qwen", half_million),
                                           qwen("qwen_not_deterministic", half_million, false),
                                           qwen("qwen_128_more", half_million + 128),
                                           Problem{"llama_128_more", 32, 8, 128, half_million + 128, 8192}),
                         name_of_problem);

// Longer than it takes to be worth running every time: 28 heads past 2^31 elements, and a million tokens.
INSTANTIATE_TEST_SUITE_P(DISABLED_Longest, FullLengthAttention,
                         ::testing::Values(qwen("qwen_past_2_31", 606'208 + 128),
                                           qwen("qwen_million", 1 << 20)),
                         name_of_problem);
#else
TEST(FullLength, AttentionOfHalfAMillionTokens) {
  GTEST_SKIP() << "needs a GPU: minutes of tera-FLOPs and 20 GB; the Small suite is the same code";
}
#endif

}  // namespace
}  // namespace layerstream::test
