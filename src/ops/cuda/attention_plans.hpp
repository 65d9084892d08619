#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/stream.hpp"
#include "ops/context.hpp"
#include "ops/detail/attention_calls.hpp"

namespace layerstream::ops::cuda {

/// All that a plan of cuDNN's depends on. Everything is bf16 but lse, which is fp32.
struct AttentionProblem {
  bool backward;
  std::int64_t heads, key_heads, head_dim;
  float scale;
  std::int64_t batch, queries, keys;
  detail::AttentionMask mask;
  std::int64_t window;  ///< 0: none
  bool ragged;
  bool deterministic;  ///< of the backward pass; forward always is

  friend auto operator<=>(const AttentionProblem&, const AttentionProblem&) = default;
};

/// "attention forward, 8 x 1024 queries ...", for messages.
std::string describe(const AttentionProblem& problem);

/// Device memory of one call. Entries of a call that is not ragged lie one after the other, each (queries,
/// NH, d) or (keys, NKV, d); those of a ragged call begin where the offsets say.
struct AttentionOperands {
  const void *q, *k, *v;
  void* o;    ///< written by forward, read by backward
  void* lse;  ///< likewise; (rows, NH), but (batch, NH, queries) for a backward call that is not ragged
  const void* dout = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  /// Of a ragged call: (batch + 1) int64 elements from q, k and lse, and (batch) int32 tokens.
  void *query_offsets = nullptr, *key_offsets = nullptr, *lse_offsets = nullptr;
  void *query_lengths = nullptr, *key_lengths = nullptr;
};

/// One stream's cuDNN handle, and a plan for each problem it has met. Used by one thread at a time.
class AttentionPlans {
 public:
  /// Touches cuDNN at first use only.
  explicit AttentionPlans(StreamView stream);
  ~AttentionPlans();
  AttentionPlans(const AttentionPlans&) = delete;
  AttentionPlans& operator=(const AttentionPlans&) = delete;

  /// Asynchronous on the stream. The first call with a problem builds its plan, which takes about a second.
  /// @throws CudaError naming the problem if cuDNN refuses it; ResourceError if the plan wants more than
  /// `workspace_bytes`.
  void run(const AttentionProblem& problem, const AttentionOperands& operands, void* workspace,
           std::size_t workspace_bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Of the context's stream; defined beside Libraries. @throws ContractError if the context has no libraries.
AttentionPlans& attention_plans(const Context& context);

}  // namespace layerstream::ops::cuda
