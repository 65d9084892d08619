// The GEMMs of Qwen2.5-7B on a CUDA device, one table:
//   gemm [rounds = 11]
// "ours" is a linear_* call, "bare" cuBLASLt with the same operands and the first choice of its heuristic
// under default preferences and as much workspace. The best of the first eight choices under our preferences
// says what a choice by timing would bring. Everything of a row runs once per round, so that clocks disturb
// all alike; rates are medians over rounds, of device time, on random numbers (a GPU draws less power, and
// clocks higher, on zeros).

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <vector>

#include "benches/cuda_bench.hpp"
#include "core/cuda_error.hpp"
#include "ops/cuda/cublas_error.hpp"
#include "ops/cuda/gemm_plans.hpp"
#include "ops/detail/gemm.hpp"
#include "ops/libraries.hpp"
#include "ops/linear.hpp"
#include "ops/runtime.hpp"

namespace {

using namespace layerstream;
using bench::DeviceBuffer;
using ops::cuda::CublasOwned;
using ops::detail::GemmArguments;

constexpr int num_candidates = 8;
constexpr int candidate_rounds = 5;

enum class Product { forward, forward_residual, backward_input, backward_weight };

const char* name_of(Product product) {
  switch (product) {
    case Product::forward:
      return "forward";
    case Product::forward_residual:
      return "forward, residual";
    case Product::backward_input:
      return "backward input";
    case Product::backward_weight:
      return "backward weight";
  }
  return "?";
}

struct Case {
  const char* layer;
  Product product;
  std::int64_t tokens, in, out;

  double flops() const { return 2.0 * static_cast<double>(tokens * in) * static_cast<double>(out); }
};

std::vector<Case> qwen2_5_7b() {
  constexpr std::int64_t hidden_size = 3584, query_key_value = 4608, key_value = 1024;
  constexpr std::int64_t intermediate_size = 18944, vocab_size = 152064, head_tile = 2048;
  std::vector<Case> cases;
  const auto add = [&](const char* layer, std::int64_t tokens, std::int64_t in, std::int64_t out,
                       std::initializer_list<Product> products) {
    for (const Product product : products) cases.push_back({layer, product, tokens, in, out});
  };
  using enum Product;
  for (const std::int64_t tokens : {8192, 16384}) {
    add("qkv", tokens, hidden_size, query_key_value, {forward, backward_input, backward_weight});
    add("kv", tokens, hidden_size, key_value, {forward});
    add("output", tokens, hidden_size, hidden_size,
        {forward, forward_residual, backward_input, backward_weight});
    add("gate, up", tokens, hidden_size, 2 * intermediate_size, {forward, backward_input, backward_weight});
    add("down", tokens, intermediate_size, hidden_size,
        {forward, forward_residual, backward_input, backward_weight});
  }
  add("head", head_tile, hidden_size, vocab_size, {forward, backward_input, backward_weight});
  return cases;
}

/// Memory for the operands of any one case.
struct Operands {
  explicit Operands(const std::vector<Case>& cases)
      : left(most(cases, [](const Case& c) { return 2 * c.tokens * std::max(c.in, c.out); })),
        right(most(cases, [](const Case& c) { return 2 * std::max(c.tokens, c.out) * c.in; })),
        residual(most(
            cases,
            [](const Case& c) { return c.product == Product::forward_residual ? 2 * c.tokens * c.out : 0; })),
        result(most(cases, [](const Case& c) {
          return std::max(2 * c.tokens * std::max(c.in, c.out), 4 * c.out * c.in);
        })) {
    left.fill_with_normals(1);
    right.fill_with_normals(2);
    residual.fill_with_normals(3);
  }

  GemmArguments of(const Case& c) const {
    const auto matrix = [](const DeviceBuffer& buffer, DType dtype, std::int64_t rows, std::int64_t columns) {
      const TensorView view(buffer.data(), dtype, {rows, columns});
      LAYERSTREAM_EXPECT(view.bytes() <= buffer.bytes(), "operand of {} bytes", view.bytes());
      return view;
    };
    const TensorView dy = matrix(left, DType::bf16, c.tokens, c.out);
    switch (c.product) {
      case Product::backward_input:
        return {.out = matrix(result, DType::bf16, c.tokens, c.in),
                .a = dy,
                .b = matrix(right, DType::bf16, c.out, c.in)};
      case Product::backward_weight: {
        const TensorView dw = matrix(result, DType::f32, c.out, c.in);
        return {.out = dw,
                .a = dy,
                .b = matrix(right, DType::bf16, c.tokens, c.in),
                .a_transposed = true,
                .addend = dw};
      }
      default: {
        GemmArguments arguments{.out = matrix(result, DType::bf16, c.tokens, c.out),
                                .a = matrix(left, DType::bf16, c.tokens, c.in),
                                .b = matrix(right, DType::bf16, c.out, c.in),
                                .b_transposed = true};
        if (c.product == Product::forward_residual) {
          arguments.addend = matrix(residual, DType::bf16, c.tokens, c.out);
        }
        return arguments;
      }
    }
  }

  DeviceBuffer left, right, residual, result;

 private:
  template <class Bytes>
  static std::size_t most(const std::vector<Case>& cases, const Bytes& bytes) {
    std::int64_t largest = 0;
    for (const Case& c : cases) largest = std::max(largest, std::int64_t{bytes(c)});
    return static_cast<std::size_t>(largest);
  }
};

void multiply_ours(const ops::Context& context, Product product, const GemmArguments& g) {
  switch (product) {
    case Product::backward_input:
      ops::linear_backward_input(context, g.out, g.a, g.b);
      break;
    case Product::backward_weight:
      ops::linear_backward_weight(context, g.out, g.a, g.b);
      break;
    default:
      ops::linear_forward(context, g.out, g.a, g.b, g.addend);
  }
}

/// cuBLASLt without this library: bf16 operands, fp32 sums.
class BareGemm {
 public:
  BareGemm(cublasLtHandle_t handle, const GemmArguments& g) : handle_(handle), g_(g) {
    cublasLtMatmulDesc_t operation = nullptr;
    LAYERSTREAM_CUBLAS(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), subject);
    operation_.reset(operation);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    if (g.b_transposed) {
      LAYERSTREAM_CUBLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                        sizeof(transposed)),
                         subject);
    }
    if (g.a_transposed) {
      LAYERSTREAM_CUBLAS(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &transposed,
                                                        sizeof(transposed)),
                         subject);
    }
    first_ = layout(g.b);
    second_ = layout(g.a);
    out_ = layout(g.out);

    cublasLtMatmulPreference_t created = nullptr;
    LAYERSTREAM_CUBLAS(cublasLtMatmulPreferenceCreate(&created), subject);
    const CublasOwned<cublasLtMatmulPreference_t> preference(created);
    const std::uint64_t workspace_bytes = ops::cuda::gemm_workspace_bytes;
    LAYERSTREAM_CUBLAS(cublasLtMatmulPreferenceSetAttribute(created, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                            &workspace_bytes, sizeof(workspace_bytes)),
                       subject);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    LAYERSTREAM_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle, operation, first_.get(), second_.get(),
                                                      out_.get(), out_.get(), created, 1, &result, &found),
                       subject);
    LAYERSTREAM_EXPECT(found == 1, "no algorithm");
    algorithm_ = result.algo;
  }

  const cublasLtMatmulAlgo_t& algorithm() const { return algorithm_; }

  void multiply(const ops::Context& context, const cublasLtMatmulAlgo_t& algorithm) const {
    const float alpha = 1.0F, beta = g_.addend ? 1.0F : 0.0F;
    const void* const addend = g_.addend ? g_.addend.data() : g_.out.data();
    LAYERSTREAM_CUBLAS(cublasLtMatmul(handle_, operation_.get(), &alpha, g_.b.data(), first_.get(),
                                      g_.a.data(), second_.get(), &beta, addend, out_.get(), g_.out.data(),
                                      out_.get(), &algorithm, context.workspace, context.workspace_bytes,
                                      static_cast<cudaStream_t>(context.stream.native())),
                       subject);
  }

 private:
  static constexpr const char* subject = "the bare product";

  static CublasOwned<cublasLtMatrixLayout_t> layout(const ConstTensorView& matrix) {
    cublasLtMatrixLayout_t created = nullptr;
    LAYERSTREAM_CUBLAS(
        cublasLtMatrixLayoutCreate(&created, matrix.dtype() == DType::f32 ? CUDA_R_32F : CUDA_R_16BF,
                                   static_cast<std::uint64_t>(matrix.dim(1)),
                                   static_cast<std::uint64_t>(matrix.dim(0)), matrix.dim(1)),
        subject);
    return CublasOwned<cublasLtMatrixLayout_t>(created);
  }

  cublasLtHandle_t handle_;
  GemmArguments g_;
  CublasOwned<cublasLtMatmulDesc_t> operation_;
  CublasOwned<cublasLtMatrixLayout_t> first_, second_, out_;
  cublasLtMatmulAlgo_t algorithm_{};
};

bool same(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

std::uint32_t splits_of(const cublasLtMatmulAlgo_t& algorithm) {
  std::uint32_t splits = 0;
  std::size_t written = 0;
  LAYERSTREAM_CUBLAS(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
                                                          &splits, sizeof(splits), &written),
                     "an algorithm");
  return splits;
}

void measure(const ops::Context& context, ops::cuda::GemmPlans& plans, const Operands& operands,
             const Case& c, int rounds) {
  const GemmArguments g = operands.of(c);
  const BareGemm bare(plans.handle(), g);
  const std::vector<double> seconds = bench::seconds_of(
      context.stream,
      {[&] { multiply_ours(context, c.product, g); }, [&] { bare.multiply(context, bare.algorithm()); }},
      rounds);

  const ops::cuda::GemmKey key{.m = g.m(),
                               .n = g.n(),
                               .k = g.k(),
                               .compute = g.a.dtype(),
                               .out = g.out.dtype(),
                               .a_transposed = g.a_transposed,
                               .b_transposed = g.b_transposed,
                               .alignment = {16, 16, 16, 16}};
  const ops::cuda::GemmPlan& plan = plans.plan(key);
  const auto candidates = ops::cuda::gemm_candidates(plans.handle(), key, plan.descriptors, num_candidates);
  std::vector<std::function<void()>> works;
  for (const auto& candidate : candidates) {
    works.emplace_back([&] { bare.multiply(context, candidate.algo); });
  }
  const std::vector<double> times = bench::seconds_of(context.stream, works, candidate_rounds);
  const auto best = std::min_element(times.begin(), times.end());

  const auto rate = [&](double time) { return 1e-12 * c.flops() / time; };
  fmt::print("| {:<8} | {:<17} | {:>6} | {:>5.0f} | {:>5.0f} | {:>9.3f} | {:>11} | {:>6} | {:>8.1f} |",
             c.layer, name_of(c.product), c.tokens, rate(seconds[0]), rate(seconds[1]),
             seconds[1] / seconds[0], same(plan.algorithm, bare.algorithm()) ? "yes" : "no",
             splits_of(plan.algorithm), static_cast<double>(candidates.front().workspaceSize) / 1048576.0);
  fmt::print(" {:>5.0f} | {:>5.0f} (#{}) | {:>10.3f} | {:>12} |\n", rate(times.front()), rate(*best),
             best - times.begin(), times.front() / *best,
             same(plan.algorithm, candidates.front().algo) ? "yes" : "no");
}

int run(int rounds) {
  const ops::Runtime runtime;
  const bench::Stream stream;
  ops::Libraries libraries;
  const DeviceBuffer workspace(ops::linear_workspace(DType::bf16));
  const ops::Context context{stream.view(), workspace.data(), workspace.bytes(), &libraries};
  const std::vector<Case> cases = qwen2_5_7b();
  const Operands operands(cases);
  LAYERSTREAM_CUDA(cudaDeviceSynchronize());
  ops::cuda::GemmPlans plans;

  cudaDeviceProp device{};
  LAYERSTREAM_CUDA(cudaGetDeviceProperties(&device, 0));
  fmt::print("{}, cuBLASLt {}, {} rounds, TFLOP/s; bf16, weight gradients added to fp32\n\n", device.name,
             cublasLtGetVersion(), rounds);
  fmt::print(
      "| layer    | product           | tokens |  ours |  bare | ours/bare | same choice | splits | work MiB "
      "|   #0 |  best of {} | best over #0 | #0 is ours |\n",
      num_candidates);
  fmt::print(
      "|----------|-------------------|--------|-------|-------|-----------|-------------|--------|----------"
      "|------|------------|--------------|------------|\n");
  for (const Case& c : cases) measure(context, plans, operands, c, rounds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 11;
  if (rounds < 1) {
    fmt::print(stderr, "gemm [rounds]: at least 1\n");
    return exit_code::refused;
  }
  try {
    return run(static_cast<int>(rounds));
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return error.code();
  }
}
