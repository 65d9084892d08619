#pragma once

// Its serialisation, which nobody here uses, would need nlohmann's JSON.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <memory>

#include "ops/cuda/attention_plans.hpp"

/// Only for sources that the C++ compiler compiles: the header is large.
namespace layerstream::ops::cuda {

/// Ids of a graph's tensors, by which an execution finds its pointers.
enum class AttentionTensor : std::int64_t {
  q = 1,
  k,
  v,
  o,
  lse,
  dout,
  dq,
  dk,
  dv,
  query_offsets,
  key_offsets,
  lse_offsets,
  query_lengths,
  key_lengths
};

/// The problem as a graph that is not yet validated.
std::shared_ptr<cudnn_frontend::graph::Graph> make_attention_graph(const AttentionProblem& problem);

}  // namespace layerstream::ops::cuda
