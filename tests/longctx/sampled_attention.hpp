#pragma once

#include <cstdint>

#include "core/ledger.hpp"
#include "ops/context.hpp"
#include "tests/support/random_tensor.hpp"

namespace layerstream::test {

/// Causal attention of one row, too long to be compared as a whole: the inputs, and what was computed of
/// them. All in device memory.
struct LongAttention {
  ConstTensorView q;  ///< (S, NH, d) fp64, fp32 or bf16, as the other tensors; lse in the accumulator dtype
  ConstTensorView k, v;  ///< (S, NKV, d)
  ConstTensorView dout;  ///< (S, NH, d)
  ConstTensorView o;     ///< (S, NH, d)
  ConstTensorView lse;   ///< (S, NH)
  double scale = 1.0;

  std::int64_t tokens() const { return q.dim(0); }
  std::int64_t heads() const { return q.dim(1); }
  std::int64_t key_heads() const { return k.dim(1); }
  std::int64_t head_dim() const { return q.dim(2); }
};

/// A row of a result: sums of weight · element, and how large the summands are. (heads, d) fp64 each.
struct SampledSums {
  OwnedTensor value;
  OwnedTensor spread;  ///< root of the sum of the squared summands
  /// The same with weights that do not cancel: p (|dout|·|v| + |dout|·|o|) in place of p (dout·v − dout·o).
  OwnedTensor size;
};

/// What one query gets.
struct SampledQuery {
  OwnedTensor total;  ///< (NH) sum of exp(score − lse): 1 where lse is right
  SampledSums o;      ///< of probabilities exp(score − lse), not divided by their total
  SampledSums dq;
};

/// What one key gets from all queries that see it.
struct SampledKey {
  SampledSums dk, dv;
};

/// FP64 attention of single rows, by kernels on the device: O(S) a row. Probabilities are made from lse, and
/// D = rowsum(dout · o) from o, as a backward pass does. Takes 4 fp64 arrays of (S, NH) from the arena.
class AttentionSampler {
 public:
  AttentionSampler(const LongAttention& attention, Arena& arena);

  /// To be called when o and lse are there, before the others.
  void prepare(const ops::Context& context) const;
  SampledQuery query(const ops::Context& context, std::int64_t row) const;
  SampledKey key(const ops::Context& context, std::int64_t row) const;

 private:
  /// One query against the keys it sees, or one key against the queries that see it.
  struct Sample {
    std::int64_t row;
    bool is_query;
  };
  void weigh(const ops::Context& context, const Sample& sample) const;
  SampledSums sum(const ops::Context& context, const Sample& sample, const TensorView& weight,
                  const TensorView& size, const ConstTensorView& rows) const;
  std::int64_t others(const Sample& sample) const;

  LongAttention attention_;
  TensorView delta_;  ///< (S, NH, 2) D, and the sum of its magnitudes
  TensorView probability_, gradient_,
      size_;  ///< (S, NH) of a sample's pairs: p, dS, and dS without cancelling
};

/// Uniform random numbers of mean 0 and standard deviation `deviation` in every element, a function of `seed`
/// and the index alone, made on the device.
void fill_uniform(const ops::Context& context, const TensorView& tensor, std::uint64_t seed,
                  double deviation);

/// A copy in fp64 that the host can read.
OwnedTensor widened(const ops::Context& context, const ConstTensorView& tensor);

}  // namespace layerstream::test
