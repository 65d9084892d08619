#pragma once

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// Target value of a position that carries no loss.
inline constexpr std::int32_t ignored_target = -100;

struct CrossEntropy {
  TensorView dlogits;       ///< (T, V) compute dtype: scale · (softmax − one-hot); empty: loss only
  TensorView nll;           ///< (T) fp64: −log softmax at the target, 0 where ignored
  ConstTensorView logits;   ///< (T, V) accumulator dtype
  ConstTensorView targets;  ///< (T) int32, in [0, V) or ignored_target
  double scale = 1.0;       ///< 1 / number of targets in the whole step
};
/// Softmax cross entropy and its gradient at once; max and sum in the accumulator dtype or better. Rows
/// whose target is ignored get zero gradient. dlogits may share memory with logits when their dtypes
/// are the same size.
void cross_entropy(const Context& context, const CrossEntropy& args);

/// *result += the sum of values, in order. @param values (T) fp64.
void add_sum(const Context& context, double* result, ConstTensorView values);

}  // namespace layerstream::ops
