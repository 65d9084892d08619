#pragma once

#include <cstdint>

#include "core/half.hpp"
#include "ops/context.hpp"
#include "ops/detail/attention_calls.hpp"

/// Small kernels around cuDNN's attention. Asynchronous on the context's stream.
namespace layerstream::ops::cuda {

/// Device memory that tells cuDNN where the entries of a ragged call begin, in elements, and how many tokens
/// each has. Entries that a call has beyond its own are empty and begin where the last one ends.
struct AttentionTable {
  AttentionTable(void* memory, std::int64_t batch);

  std::int64_t *query_offsets, *key_offsets, *lse_offsets;  // (batch + 1)
  std::int32_t *query_lengths, *key_lengths;                // (batch)
};

/// Offsets of queries and keys count from the call's first rows; those of lse from row 0. The numbers travel
/// as arguments of the kernel.
void write_table(const Context& context, const AttentionTable& table, const detail::AttentionCall& call,
                 const detail::AttentionShape& shape);

/// out[b, h, i] = lse[b · queries + i, h].
void transpose_lse(const Context& context, float* out, const float* lse, std::int64_t batch,
                   std::int64_t queries, std::int64_t heads);

/// Outputs of attention over some keys of each query, and over others.
struct OutputParts {
  bf16* o;                // (rows, NH, d) replaced by the outputs over both
  float* lse;             // (rows, NH)
  const bf16* more;       // (rows, NH, d)
  const float* more_lse;  // (rows, NH)
};
/// Exact up to rounding: a softmax over disjoint sets of keys is the mean of theirs, weighted by exp(lse).
/// @param rows of queries; head_dim is a multiple of 8
void join_outputs(const Context& context, const OutputParts& parts, std::int64_t rows,
                  const detail::AttentionShape& shape);

/// Rows of dk and dv, and one call's part of them, from the call's first row of keys on.
struct KeyGradients {
  float *dk, *dv;                 // (rows, NKV, d)
  const bf16 *dk_part, *dv_part;  // (rows, NKV, d)
  bool store;                     // the part, as if it were added to zeros
};
/// Only rows of the call's entries are touched. @param table of a ragged call
void write_key_gradients(const Context& context, const KeyGradients& gradients, const AttentionTable& table,
                         const detail::AttentionCall& call, const detail::AttentionShape& shape);

/// One step of dq = part + part + ..., summed in fp32 and rounded once.
struct QueryGradients {
  bf16* dq;          // what came before if this is the second part, and the result after the last
  float* sum;        // otherwise
  const bf16* part;  // from the second on
  bool second, last;
};
/// @param elements a multiple of 8
void sum_query_gradients(const Context& context, const QueryGradients& gradients, std::int64_t elements);

}  // namespace layerstream::ops::cuda
