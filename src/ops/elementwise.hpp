#pragma once

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// out = a + b, rounded once. Same shape and compute dtype; out may be a or b.
void add(const Context& context, TensorView out, ConstTensorView a, ConstTensorView b);

/// act = silu(gate) · up, silu(z) = z / (1 + exp(-z)) (Shazeer, "GLU Variants Improve Transformer",
/// 2020). @param act (T, F), @param gate_up (T, 2F): gate in columns [0, F), up in [F, 2F).
void swiglu_forward(const Context& context, TensorView act, ConstTensorView gate_up);

/// @param dgate_up (T, 2F); may be gate_up. @param dact (T, F), @param gate_up (T, 2F).
/// @param act (T, F): takes what swiglu_forward writes, the same bits, and may be dact; empty: not wanted.
void swiglu_backward(const Context& context, TensorView dgate_up, ConstTensorView dact,
                     ConstTensorView gate_up, TensorView act = {});

/// out = the FP32 numbers of two halves (see core/half.hpp). @param out (n) fp32, @param hi (n) bf16,
/// @param lo (n) int16.
void merge_halves(const Context& context, TensorView out, ConstTensorView hi, ConstTensorView lo);

/// Sets every element to zero.
void fill_zero(const Context& context, TensorView out);

/// *result = sum of squares of x in double, in a fixed order that depends on x's size alone.
/// @param x fp32, @param result device pointer to one double. A NaN or Inf in x makes the result not
/// finite, and nothing else does: squares of fp32 cannot overflow a double.
/// Needs workspace: sum_of_squares_workspace(elements of x).
void sum_of_squares(const Context& context, double* result, ConstTensorView x);
std::size_t sum_of_squares_workspace(std::int64_t elements);

}  // namespace layerstream::ops
