#include "ops/cuda/attention_plans.hpp"

#include <map>
#include <unordered_map>
#include <utility>

#include "core/cuda_error.hpp"
#include "ops/cuda/attention_graph.hpp"

namespace layerstream::ops::cuda {
namespace {

namespace fe = cudnn_frontend;

void check(fe::error_t status, const char* step, const AttentionProblem& problem) {
  if (status.is_good()) return;
  (void)cudaGetLastError();
  throw CudaError(fmt::format("cuDNN cannot {} for {}: {}", step, describe(problem), status.get_message()));
}

void check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  (void)cudaGetLastError();
  throw CudaError(fmt::format("{} failed: {}", call, cudnnGetErrorString(status)));
}

const char* name_of(detail::AttentionMask mask) {
  switch (mask) {
    case detail::AttentionMask::none:
      return "no mask";
    case detail::AttentionMask::causal:
      return "causal";
    case detail::AttentionMask::bottom_right:
      return "bottom-right causal";
  }
  return "?";
}

struct DestroyHandle {
  void operator()(cudnnHandle_t handle) const { (void)cudnnDestroy(handle); }
};
using Handle = std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, DestroyHandle>;

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  std::size_t workspace_bytes;
};

Plan build(cudnnHandle_t handle, const AttentionProblem& problem) {
  std::shared_ptr<fe::graph::Graph> graph = make_attention_graph(problem);
  check(graph->validate(), "validate a graph", problem);
  check(graph->build_operation_graph(handle), "make an operation graph", problem);
  check(graph->create_execution_plans({fe::HeurMode_t::A}), "find an engine", problem);
  check(graph->check_support(), "run", problem);
  check(graph->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE), "build a plan", problem);
  std::int64_t bytes = 0;
  check(graph->get_workspace_size(bytes), "tell its workspace", problem);
  return {std::move(graph), static_cast<std::size_t>(bytes)};
}

}  // namespace

std::string describe(const AttentionProblem& problem) {
  return fmt::format("attention {}, {} x {} queries, {} keys, {} / {} heads of {}, {}, window {}{}{}",
                     problem.backward ? "backward" : "forward", problem.batch, problem.queries, problem.keys,
                     problem.heads, problem.key_heads, problem.head_dim, name_of(problem.mask),
                     problem.window, problem.ragged ? ", ragged" : "",
                     problem.backward && problem.deterministic ? ", deterministic" : "");
}

struct AttentionPlans::State {
  StreamView stream;
  Handle handle;
  std::map<AttentionProblem, Plan> plans;

  cudnnHandle_t ready_handle() {
    if (!handle) {
      cudnnHandle_t made = nullptr;
      check(cudnnCreate(&made), "cudnnCreate");
      handle.reset(made);
      check(cudnnSetStream(made, static_cast<cudaStream_t>(stream.native())), "cudnnSetStream");
    }
    return handle.get();
  }

  const Plan& plan(const AttentionProblem& problem) {
    const auto found = plans.find(problem);
    if (found != plans.end()) return found->second;
    return plans.emplace(problem, build(ready_handle(), problem)).first->second;
  }
};

AttentionPlans::AttentionPlans(StreamView stream) : state_(new State{stream, nullptr, {}}) {}
AttentionPlans::~AttentionPlans() = default;

void AttentionPlans::run(const AttentionProblem& problem, const AttentionOperands& operands, void* workspace,
                         std::size_t workspace_bytes) {
  const Plan& plan = state_->plan(problem);
  if (plan.workspace_bytes > workspace_bytes) {
    throw ResourceError(fmt::format(
        "cuDNN wants {} bytes of workspace for {}, there are {}: this version of cuDNN ({}) needs "
        "more than attention_workspace() counts on",
        plan.workspace_bytes, describe(problem), workspace_bytes, cudnnGetVersion()));
  }
  using Id = AttentionTensor;
  std::unordered_map<std::int64_t, void*> pointers;
  const auto bind = [&](Id id, const void* pointer) {
    pointers.emplace(static_cast<std::int64_t>(id), const_cast<void*>(pointer));
  };
  bind(Id::q, operands.q);
  bind(Id::k, operands.k);
  bind(Id::v, operands.v);
  bind(Id::o, operands.o);
  bind(Id::lse, operands.lse);
  if (problem.backward) {
    bind(Id::dout, operands.dout);
    bind(Id::dq, operands.dq);
    bind(Id::dk, operands.dk);
    bind(Id::dv, operands.dv);
  }
  if (problem.ragged) {
    bind(Id::query_offsets, operands.query_offsets);
    bind(Id::key_offsets, operands.key_offsets);
    bind(Id::lse_offsets, operands.lse_offsets);
    bind(Id::query_lengths, operands.query_lengths);
    bind(Id::key_lengths, operands.key_lengths);
  }
  check(plan.graph->execute(state_->ready_handle(), pointers, workspace), "execute a plan", problem);
}

}  // namespace layerstream::ops::cuda
