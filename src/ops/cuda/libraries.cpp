#include "core/error.hpp"
#include "ops/cuda/libraries_state.hpp"
#include "ops/detail/execution.hpp"

namespace layerstream::ops {

StreamState::StreamState(StreamView stream)
    : space(static_cast<cudaStream_t>(stream.native())), attention(stream) {}

StreamState& Libraries::State::of(StreamView stream) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<StreamState>& state = streams_[stream.native()];
  if (!state) state = std::make_unique<StreamState>(stream);
  return *state;
}

Libraries::Libraries() : state_(std::make_unique<State>()) {}
Libraries::~Libraries() = default;
void Libraries::prepare(StreamView stream) {
  state_->of(stream);
}
void Libraries::set_rehearsing(StreamView stream, bool rehearsing) {
  state_->of(stream).gemm.set_rehearsing(rehearsing);
}

namespace detail {

StreamState& stream_state(const Context& context) {
  LAYERSTREAM_EXPECT(context.libraries != nullptr, "a context without libraries in a CUDA build");
  return context.libraries->state().of(context.stream);
}

const ExecutionSpace& execution_space(const Context& context) {
  return stream_state(context).space;
}

}  // namespace detail

cuda::GemmPlans& cuda::gemm_plans(const Context& context) {
  return detail::stream_state(context).gemm;
}

cuda::AttentionPlans& cuda::attention_plans(const Context& context) {
  return detail::stream_state(context).attention;
}

}  // namespace layerstream::ops
