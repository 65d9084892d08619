#pragma once

#include <functional>
#include <vector>

#include "ops/cuda/gemm_plans.hpp"
#include "ops/detail/gemm.hpp"

namespace layerstream::ops::cuda {

/// Runs the product with an algorithm. Ordered on the context's stream.
using RunGemm = std::function<void(const cublasLtMatmulAlgo_t&)>;

/// The fastest of the candidates whose every bit equals the first's, on random operands: with it the numbers
/// are those of a process that did not try. The contents of a, b and out are lost. Waits for the stream; takes
/// tens of milliseconds.
cublasLtMatmulAlgo_t fastest_with_same_bits(const Context& context, const detail::GemmArguments& arguments,
                                            const std::vector<cublasLtMatmulHeuristicResult_t>& candidates,
                                            const RunGemm& run);

}  // namespace layerstream::ops::cuda
