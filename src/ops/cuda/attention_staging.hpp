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

/// Rows of dk and dv, and of what one call adds to them, from the call's first row of keys on.
struct KeyGradients {
  float *dk, *dv;                     // (rows, NKV, d)
  const bf16 *dk_addend, *dv_addend;  // (rows, NKV, d)
};
/// Only rows of the call's entries are touched. @param table of a ragged call
void add_key_gradients(const Context& context, const KeyGradients& gradients, const AttentionTable& table,
                       const detail::AttentionCall& call, const detail::AttentionShape& shape);

/// One step of dq = addend + addend + ..., summed in fp32 and rounded once: the first addend is stored to
/// `sum`, the next are added, and with the last the result goes to `dq`. @param elements a multiple of 8
void sum_query_gradients(const Context& context, bf16* dq, float* sum, const bf16* addend,
                         std::int64_t elements, detail::AttentionCall::QueryGradient part);

}  // namespace layerstream::ops::cuda
