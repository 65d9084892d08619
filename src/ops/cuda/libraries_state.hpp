#pragma once

#include <map>
#include <memory>
#include <mutex>

#include <Kokkos_Core.hpp>

#include "ops/context.hpp"
#include "ops/cuda/attention_plans.hpp"
#include "ops/cuda/gemm_plans.hpp"
#include "ops/libraries.hpp"

namespace layerstream::ops {

/// What is kept for one stream. Used by one thread at a time.
struct StreamState {
  explicit StreamState(StreamView stream);

  Kokkos::Cuda space;
  cuda::GemmPlans gemm;
  cuda::AttentionPlans attention;
};

struct Libraries::State {
  /// Made at the stream's first use. Safe from any thread.
  StreamState& of(StreamView stream);

 private:
  std::mutex mutex_;
  std::map<void*, std::unique_ptr<StreamState>> streams_;
};

namespace detail {

/// @throws ContractError if the context has no libraries.
StreamState& stream_state(const Context& context);

}  // namespace detail
}  // namespace layerstream::ops
