#pragma once

#include <functional>
#include <vector>

#include "ops/cuda/gemm_plans.hpp"
#include "ops/detail/gemm.hpp"

namespace layerstream::ops::cuda {

/// Runs the product with an algorithm, with its addend (out itself if it has none) or without. Ordered on the
/// context's stream.
using RunGemm = std::function<void(const cublasLtMatmulAlgo_t&, bool adds)>;

/// The fastest of the algorithms whose every bit equals the first's, on random operands, adding and not: with
/// it the numbers are those of a process that did not try. Algorithms after the first that cannot run are
/// passed over. The contents of a, b, addend and out are lost. Waits for the stream; takes tens of
/// milliseconds.
cublasLtMatmulAlgo_t fastest_with_same_bits(const Context& context, const detail::GemmArguments& arguments,
                                            const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                                            const RunGemm& run);

}  // namespace layerstream::ops::cuda
