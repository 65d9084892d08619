// bf16 attention with the heads of Qwen2.5-7B (28 / 4 of 128) on a CUDA device, one table:
//   attention [rounds = 11]
// "ours" is an attention_* call, which in backward overwrites dk and dv as the last chunk of a group does, or
// in the case of a chunk adds to them as all others do. "bare" is one execution of cuDNN's plan for the whole
// problem, deterministic where ours is, with as much workspace as it asks for and lse already in the order
// that it wants; it leaves dk and dv in bf16. "own" is the time of our kernels between cuDNN's, run without
// them, as a share of ours. Everything of a row runs once per round, so that clocks disturb all alike; rates
// are medians over rounds, of device time, on random numbers (a GPU draws less power, and clocks higher, on
// zeros). Flops are those that the mask leaves.

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "benches/cuda_bench.hpp"
#include "core/random.hpp"
#include "ops/attention.hpp"
#include "ops/cuda/attention_plans.hpp"
#include "ops/cuda/attention_staging.hpp"
#include "ops/libraries.hpp"
#include "ops/runtime.hpp"

namespace {

using namespace layerstream;
using bench::DeviceBuffer;
using ops::AttentionSegment;

constexpr std::int64_t heads = 28, key_heads = 4, head_dim = 128;

struct Case {
  std::string name;
  std::int64_t queries, keys;
  std::vector<AttentionSegment> segments;
  bool uniform;     ///< one plan of cuDNN's computes it all
  bool accumulate;  ///< in backward

  /// Two products forward, five backward, of two flops for each pair that the mask leaves.
  double forward_flops() const {
    double pairs = 0.0;
    for (const AttentionSegment& s : segments) {
      const auto n = static_cast<double>(s.num_queries);
      pairs += n * static_cast<double>(s.num_keys - s.num_queries) + n * (n + 1.0) / 2.0;
    }
    return 4.0 * pairs * static_cast<double>(heads * head_dim);
  }
  double backward_flops() const { return 2.5 * forward_flops(); }
};

Case rows_of(std::int64_t tokens, std::int64_t rows) {
  Case c{fmt::format("{} x {}", rows, tokens), rows * tokens, rows * tokens, {}, true, false};
  for (std::int64_t row = 0; row < rows; ++row) {
    c.segments.push_back({row * tokens, tokens, row * tokens, tokens});
  }
  return c;
}

Case packed(std::int64_t tokens, std::int64_t longest) {
  Case c{fmt::format("packed, up to {}", longest), tokens, tokens, {}, false, false};
  for (std::int64_t at = 0; at < tokens;) {
    const double uniform = uniform_at(1, 0, c.segments.size());
    const auto length = std::min(
        tokens - at,
        std::int64_t{1} + static_cast<std::int64_t>(static_cast<double>(longest) * uniform * uniform));
    c.segments.push_back({at, length, at, length});
    at += length;
  }
  return c;
}

Case chunk_of(std::int64_t tokens, std::int64_t keys) {
  return {fmt::format("{} of {}", tokens, keys), tokens, keys, {{0, tokens, 0, keys}}, false, true};
}

struct Operands {
  Operands(std::int64_t queries, std::int64_t keys)
      : q(2 * size(queries, heads)),
        k(2 * size(keys, key_heads)),
        v(k.bytes()),
        o(q.bytes()),
        dout(q.bytes()),
        dq(q.bytes()),
        dk(2 * k.bytes()),
        dv(2 * k.bytes()),
        lse(4 * static_cast<std::size_t>(queries * heads)),
        head_major_lse(lse.bytes()),
        dq_sum(2 * q.bytes()),
        table(ops::detail::attention_table_bytes(ops::detail::attention_call_entries)) {
    q.fill_with_normals(1);
    k.fill_with_normals(2);
    v.fill_with_normals(3);
    dout.fill_with_normals(4);
  }

  static std::size_t size(std::int64_t tokens, std::int64_t num_heads) {
    return static_cast<std::size_t>(tokens * num_heads * head_dim);
  }
  static TensorView rows(const DeviceBuffer& buffer, std::int64_t tokens, std::int64_t num_heads,
                         DType dtype = DType::bf16) {
    return {buffer.data(), dtype, {tokens, num_heads, head_dim}};
  }

  DeviceBuffer q, k, v, o, dout, dq, dk, dv, lse, head_major_lse, dq_sum, table;
};

class Bench {
 public:
  Bench(const ops::Context& context, const Operands& operands, const DeviceBuffer& bare_workspace, int rounds)
      : context_(context), operands_(operands), bare_workspace_(bare_workspace), rounds_(rounds) {}

  void measure(const Case& c) const {
    std::vector<std::function<void()>> works = {[&] { forward(c); }, [&] { backward(c, true); },
                                                [&] { backward(c, false); }, [&] { own_kernels(c, true); },
                                                [&] { own_kernels(c, false); }};
    if (c.uniform) {
      forward(c);
      const AttentionSegment& row = c.segments.front();
      ops::cuda::transpose_lse(context_, static_cast<float*>(operands_.head_major_lse.data()),
                               static_cast<const float*>(operands_.lse.data()),
                               static_cast<std::int64_t>(c.segments.size()), row.num_queries, heads);
      works.emplace_back([&] { bare(c, false, true); });
      works.emplace_back([&] { bare(c, true, true); });
      works.emplace_back([&] { bare(c, true, false); });
    }
    const std::vector<double> seconds = bench::seconds_of(context_.stream, works, rounds_);
    const double flops[] = {c.forward_flops(), c.backward_flops(), c.backward_flops()};
    std::string line = fmt::format("{:<18}", c.name);
    for (std::size_t i = 0; i < 3; ++i) {
      line += fmt::format("  {:8.3f} ms {:4.0f}", 1e3 * seconds[i], 1e-12 * flops[i] / seconds[i]);
      line += c.uniform ? fmt::format(" {:4.0f} {:5.2f}", 1e-12 * flops[i] / seconds[i + 5],
                                      seconds[i + 5] / seconds[i])
                        : std::string(11, ' ');
      if (i > 0) line += fmt::format(" {:4.1f}%", 100.0 * seconds[i + 2] / seconds[i]);
    }
    fmt::print("{}\n", line);
  }

 private:
  ops::AttentionSettings settings(bool deterministic) const { return {scale(), deterministic}; }
  static double scale() { return 1.0 / std::sqrt(static_cast<double>(head_dim)); }

  void forward(const Case& c) const {
    ops::attention_forward(context_,
                           {.o = Operands::rows(operands_.o, c.queries, heads),
                            .lse = {operands_.lse.data(), DType::f32, {c.queries, heads}},
                            .q = Operands::rows(operands_.q, c.queries, heads),
                            .k = Operands::rows(operands_.k, c.keys, key_heads),
                            .v = Operands::rows(operands_.v, c.keys, key_heads)},
                           c.segments, settings(true));
  }

  void backward(const Case& c, bool deterministic) const {
    const TensorView lse(operands_.lse.data(), DType::f32, {c.queries, heads});
    ops::attention_backward(context_,
                            {.dq = Operands::rows(operands_.dq, c.queries, heads),
                             .dk = Operands::rows(operands_.dk, c.keys, key_heads, DType::f32),
                             .dv = Operands::rows(operands_.dv, c.keys, key_heads, DType::f32),
                             .dout = Operands::rows(operands_.dout, c.queries, heads),
                             .q = Operands::rows(operands_.q, c.queries, heads),
                             .k = Operands::rows(operands_.k, c.keys, key_heads),
                             .v = Operands::rows(operands_.v, c.keys, key_heads),
                             .o = Operands::rows(operands_.o, c.queries, heads),
                             .lse = lse,
                             .accumulate = c.accumulate},
                            c.segments, settings(deterministic));
  }

  /// What attention_backward launches beside cuDNN's plans, on the rows of the same calls; v and o stand in
  /// for cuDNN's parts.
  void own_kernels(const Case& c, bool deterministic) const {
    using Part = ops::detail::AttentionCall::QueryGradient;
    const ops::detail::AttentionShape shape{heads, key_heads, head_dim, scale(), deterministic};
    const ops::detail::AttentionCost cost{heads, key_heads, head_dim, deterministic};
    const auto* part = static_cast<const bf16*>(operands_.v.data());
    Part before = Part::whole;
    for (const auto& call : ops::detail::attention_backward_calls(c.segments, cost)) {
      const ops::cuda::AttentionTable table(operands_.table.data(), call.batch);
      if (call.ragged) {
        ops::cuda::write_table(context_, table, call, shape);
      } else {
        ops::cuda::transpose_lse(context_, static_cast<float*>(operands_.head_major_lse.data()),
                                 static_cast<const float*>(operands_.lse.data()) + call.first_query() * heads,
                                 call.batch, call.queries, heads);
      }
      const std::int64_t key = call.first_key() * shape.key_stride();
      ops::cuda::write_key_gradients(context_,
                                     {.dk = static_cast<float*>(operands_.dk.data()) + key,
                                      .dv = static_cast<float*>(operands_.dv.data()) + key,
                                      .dk_part = part,
                                      .dv_part = part,
                                      .store = !c.accumulate},
                                     table, call, shape);
      if (call.query_gradient == Part::next || call.query_gradient == Part::last) {
        ops::cuda::sum_query_gradients(
            context_,
            {.dq = static_cast<bf16*>(operands_.dq.data()) + call.first_query() * shape.query_stride(),
             .sum = static_cast<float*>(operands_.dq_sum.data()),
             .part = static_cast<const bf16*>(operands_.o.data()),
             .second = before == Part::first,
             .last = call.query_gradient == Part::last},
            call.query_rows() * shape.query_stride());
      }
      before = call.query_gradient;
    }
  }

  void bare(const Case& c, bool is_backward, bool deterministic) const {
    const AttentionSegment& row = c.segments.front();
    ops::cuda::attention_plans(context_).run(
        {.backward = is_backward,
         .heads = heads,
         .key_heads = key_heads,
         .head_dim = head_dim,
         .scale = static_cast<float>(scale()),
         .batch = static_cast<std::int64_t>(c.segments.size()),
         .queries = row.num_queries,
         .keys = row.num_keys,
         .mask = ops::detail::AttentionMask::causal,
         .window = 0,
         .ragged = false,
         .deterministic = deterministic},
        {.q = operands_.q.data(),
         .k = operands_.k.data(),
         .v = operands_.v.data(),
         .o = operands_.o.data(),
         .lse = is_backward ? operands_.head_major_lse.data() : operands_.lse.data(),
         .dout = operands_.dout.data(),
         .dq = operands_.dq.data(),
         .dk = operands_.dk.data(),
         .dv = operands_.dv.data()},
        bare_workspace_.data(), bare_workspace_.bytes());
  }

  const ops::Context& context_;
  const Operands& operands_;
  const DeviceBuffer& bare_workspace_;
  int rounds_;
};

int run(int rounds) {
  const ops::Runtime runtime;
  const bench::Stream stream;
  ops::Libraries libraries;
  const std::vector<Case> cases = {rows_of(512, 16),   rows_of(1024, 8),   rows_of(1024, 16),
                                   rows_of(2048, 4),   rows_of(4096, 4),   rows_of(16384, 1),
                                   packed(8192, 1024), packed(8192, 4096), chunk_of(8192, 32768)};
  ops::AttentionLimits limits{heads, key_heads, head_dim, DType::bf16, 0, 0};
  std::size_t bare_bytes = 0;
  for (const Case& c : cases) {
    limits.queries = std::max(limits.queries, c.queries);
    limits.keys = std::max(limits.keys, c.keys);
    if (!c.uniform) continue;
    for (const bool deterministic : {true, false}) {
      const ops::detail::AttentionCost cost{heads, key_heads, head_dim, deterministic};
      const AttentionSegment& row = c.segments.front();
      bare_bytes = std::max(bare_bytes, cost.backward_bytes(static_cast<std::int64_t>(c.segments.size()),
                                                            row.num_queries, row.num_keys));
    }
  }
  std::size_t bytes = 0;
  for (const bool deterministic : {true, false}) {
    limits.deterministic = deterministic;
    bytes = std::max(bytes, ops::attention_workspace(limits));
  }
  const DeviceBuffer workspace(bytes), bare_workspace(bare_bytes);
  const Operands operands(limits.queries, limits.keys);
  const ops::Context context{stream.view(), workspace.data(), workspace.bytes(), &libraries};
  fmt::print(
      "workspace {:.0f} MiB, bare up to {:.0f} MiB; ms and TFLOP/s of ours, TFLOP/s of bare, ours / bare, own\n",
      std::ldexp(static_cast<double>(bytes), -20), std::ldexp(static_cast<double>(bare_bytes), -20));
  fmt::print("{:<18}  {:<29}{:<35}{}\n", "rows x tokens", "forward", "backward, deterministic",
             "backward, not");
  const Bench bench(context, operands, bare_workspace, rounds);
  for (const Case& c : cases) bench.measure(c);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 11);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return exit_code::failure;
  }
}
