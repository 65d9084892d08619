#include "ops/detail/gemm.hpp"

#include <vector>

#include "ops/cuda/cublas_error.hpp"
#include "ops/cuda/gemm_plans.hpp"
#include "ops/cuda/gemm_trial.hpp"
#include "ops/detail/check.hpp"

namespace layerstream::ops::detail {
namespace {

cuda::GemmKey key_of(const GemmArguments& g, const void* addend) {
  using cuda::alignment_class;
  return {.m = g.m(),
          .n = g.n(),
          .k = g.k(),
          .compute = g.a.dtype(),
          .out = g.out.dtype(),
          .a_transposed = g.a_transposed,
          .b_transposed = g.b_transposed,
          .alignment = {alignment_class(g.a.data()), alignment_class(g.b.data()), alignment_class(addend),
                        alignment_class(g.out.data())}};
}

}  // namespace

void gemm(const char* operation, const Context& context, const GemmArguments& g) {
  void* const workspace = workspace_as<std::byte>(operation, context, gemm_workspace(g.a.dtype()));
  cuda::GemmPlans& plans = cuda::gemm_plans(context);
  // With beta = 0 cuBLASLt does not read it.
  const void* const addend = g.addend ? g.addend.data() : g.out.data();
  const cuda::GemmKey key = key_of(g, addend);
  cuda::GemmPlan& plan = plans.plan(key);
  const cuda::GemmDescriptors& descriptors = plan.descriptors;

  const auto multiply = [&](const auto alpha, const auto beta, const cublasLtMatmulAlgo_t& algorithm) {
    LAYERSTREAM_CUBLAS(
        cublasLtMatmul(plans.handle(), descriptors.operation.get(), &alpha, g.b.data(),
                       descriptors.first.get(), g.a.data(), descriptors.second.get(), &beta, addend,
                       descriptors.out.get(), g.out.data(), descriptors.out.get(), &algorithm, workspace,
                       cuda::gemm_workspace_bytes, static_cast<cudaStream_t>(context.stream.native())),
        fmt::format("{}: {}", operation, cuda::describe(key)));
  };
  const auto run = [&](const cublasLtMatmulAlgo_t& algorithm, bool adds) {
    if (key.compute == DType::f64) {
      multiply(1.0, adds ? 1.0 : 0.0, algorithm);
    } else {
      multiply(1.0F, adds ? 1.0F : 0.0F, algorithm);
    }
  };
  if (plans.is_rehearsing() && !plan.tried) {
    // The first is what a process that does not try has.
    std::vector<cublasLtMatmulAlgo_t> algorithms{plan.algorithm};
    constexpr int candidates = 8;
    for (const auto& candidate : cuda::gemm_candidates(plans.handle(), key, descriptors, candidates)) {
      algorithms.push_back(candidate.algo);
    }
    plan.algorithm = cuda::fastest_with_same_bits(context, g, algorithms, run);
    plan.tried = true;
  }
  run(plan.algorithm, static_cast<bool>(g.addend));
}

std::size_t gemm_workspace(DType) {
  return cuda::gemm_workspace_bytes;
}

}  // namespace layerstream::ops::detail
