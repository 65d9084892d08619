#pragma once

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// The three GEMMs of a linear layer y = x · wᵀ. Products accumulate in fp32 (fp64 for fp64) over the
/// whole inner extent and are rounded once, in an order that depends on shapes and dtypes only (in a CUDA
/// build also on whether the pointers are 16-byte aligned).
/// All three need workspace: linear_workspace(compute dtype). In a CPU build it is 0 where operands need no
/// conversion.

/// y = x · wᵀ, or residual + x · wᵀ.
/// @param y (T, N) compute or accumulator dtype; @param x (T, K), @param w (N, K) compute dtype.
/// @param residual (T, N) of y's dtype, may be y. A CUDA build rounds the sum once; a CPU build rounds the
/// product and then the sum, as with ops::add, except that fp64 and fp32 sums start from a residual that is
/// y.
void linear_forward(const Context& context, TensorView y, ConstTensorView x, ConstTensorView w,
                    ConstTensorView residual = {});

/// dx = dy · w. @param dx (T, K), @param dy (T, N), @param w (N, K), all compute dtype.
void linear_backward_input(const Context& context, TensorView dx, ConstTensorView dy, ConstTensorView w);

/// dw += dyᵀ · x, or dw = dyᵀ · x, whatever dw held, if not `accumulate`. @param dw (N, K) accumulator dtype;
/// @param dy (T, N), @param x (T, K) compute dtype.
void linear_backward_weight(const Context& context, TensorView dw, ConstTensorView dy, ConstTensorView x,
                            bool accumulate = true);

std::size_t linear_workspace(DType compute);
/// The same for a GPU, in any build. NVIDIA's figure for Hopper (cuBLAS documentation, cublasSetWorkspace); a
/// constant, so that the choice of an algorithm never depends on how much memory there is.
inline constexpr std::size_t gpu_linear_workspace = std::size_t{32} << 20;

/// y[t, :] += bias. @param y (T, N) compute dtype, @param bias (N) accumulator dtype.
void add_bias(const Context& context, TensorView y, ConstTensorView bias);

/// dbias += sum over t of dy[t, :], in an order that depends on T alone (on a CPU, that of t). @param dbias
/// (N) accumulator dtype, @param dy (T, N).
void bias_backward(const Context& context, TensorView dbias, ConstTensorView dy);

}  // namespace layerstream::ops
