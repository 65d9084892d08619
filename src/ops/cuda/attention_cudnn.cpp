#include "ops/cuda/attention_cudnn.hpp"

#include <initializer_list>

#include "ops/cuda/attention_plans.hpp"
#include "ops/cuda/attention_staging.hpp"
#include "ops/detail/attention_calls.hpp"
#include "ops/detail/attention_written.hpp"
#include "ops/elementwise.hpp"

namespace layerstream::ops::cuda {
namespace {

using detail::AttentionCall;
using detail::AttentionShape;
using Part = AttentionCall::QueryGradient;

void expect_aligned(const char* operation, std::initializer_list<ConstTensorView> tensors) {
  for (const ConstTensorView& tensor : tensors) {
    LAYERSTREAM_EXPECT(reinterpret_cast<std::uintptr_t>(tensor.data()) % 16 == 0,
                       "{}: a tensor at {}, which is no multiple of 16", operation, tensor.data());
  }
}

/// The workspace of one call of attention.
class Workspace {
 public:
  Workspace(const Context& context, const AttentionLimits& limits)
      : layout_(limits),
        begin_(static_cast<std::byte*>(context.workspace)),
        bytes_(context.workspace_bytes) {}

  AttentionTable table(const AttentionCall& call) const { return {begin_ + layout_.table, call.batch}; }
  float* lse() const { return reinterpret_cast<float*>(begin_ + layout_.lse); }
  bf16* dk() const { return reinterpret_cast<bf16*>(begin_ + layout_.dk); }
  bf16* dv() const { return reinterpret_cast<bf16*>(begin_ + layout_.dv); }
  bf16* dq() const { return reinterpret_cast<bf16*>(begin_ + layout_.dq); }
  /// Of a forward call that joins: o from its first query on, lse from query 0 on.
  bf16* more_o() const { return dq(); }
  float* more_lse() const { return lse(); }
  float* dq_sum() const { return reinterpret_cast<float*>(begin_ + layout_.dq_sum); }
  void* plan() const { return begin_ + layout_.plan; }
  std::size_t plan_bytes() const { return bytes_ - layout_.plan; }

 private:
  detail::AttentionWorkspaceLayout layout_;
  std::byte* begin_;
  std::size_t bytes_;
};

AttentionProblem problem_of(const AttentionCall& call, const AttentionShape& shape, bool backward) {
  return {.backward = backward,
          .heads = shape.heads,
          .key_heads = shape.key_heads,
          .head_dim = shape.head_dim,
          .scale = static_cast<float>(shape.scale),
          .batch = call.batch,
          .queries = call.queries,
          .keys = call.keys,
          .mask = call.mask,
          .window = call.window,
          .ragged = call.ragged,
          .deterministic = !backward || shape.deterministic};
}

void bind_table(AttentionOperands& operands, const AttentionTable& table) {
  operands.query_offsets = table.query_offsets;
  operands.key_offsets = table.key_offsets;
  operands.lse_offsets = table.lse_offsets;
  operands.query_lengths = table.query_lengths;
  operands.key_lengths = table.key_lengths;
}

void run_forward(const Context& context, const AttentionForward& args, const AttentionCall& call,
                 const AttentionShape& shape, const Workspace& workspace) {
  const std::int64_t first = call.first_query(), query = first * shape.query_stride();
  const std::int64_t key = call.first_key() * shape.key_stride();
  bf16* const o = args.o.as<bf16>() + query;
  float* const lse = args.lse.as<float>();
  float* const written_lse = call.joins ? workspace.more_lse() : lse;
  AttentionOperands operands{.q = args.q.as<bf16>() + query,
                             .k = args.k.as<bf16>() + key,
                             .v = args.v.as<bf16>() + key,
                             .o = call.joins ? workspace.more_o() : o,
                             .lse = written_lse + (call.ragged ? 0 : first * shape.heads)};
  if (call.ragged) {
    const AttentionTable table = workspace.table(call);
    write_table(context, table, call, shape);
    bind_table(operands, table);
  }
  attention_plans(context).run(problem_of(call, shape, false), operands, workspace.plan(),
                               workspace.plan_bytes());
  if (!call.joins) return;
  join_outputs(context,
               {.o = o,
                .lse = lse + first * shape.heads,
                .more = workspace.more_o(),
                .more_lse = workspace.more_lse() + first * shape.heads},
               call.query_rows(), shape);
}

/// The backward pass, one call after the other.
class BackwardPass {
 public:
  BackwardPass(const Context& context, const AttentionBackward& args, const AttentionShape& shape,
               const AttentionLimits& limits)
      : context_(context), args_(args), shape_(shape), workspace_(context, limits) {}

  void run(const AttentionCall& call) {
    const std::int64_t query = call.first_query() * shape_.query_stride();
    const std::int64_t key = call.first_key() * shape_.key_stride();
    const bool is_sum = call.query_gradient == Part::next || call.query_gradient == Part::last;
    bf16* const dq = args_.dq.as<bf16>() + query;
    const AttentionTable table = workspace_.table(call);
    AttentionOperands operands{.q = args_.q.as<bf16>() + query,
                               .k = args_.k.as<bf16>() + key,
                               .v = args_.v.as<bf16>() + key,
                               .o = const_cast<bf16*>(args_.o.as<bf16>() + query),
                               .lse = prepared_lse(call),
                               .dout = args_.dout.as<bf16>() + query,
                               .dq = is_sum ? workspace_.dq() : dq,
                               .dk = workspace_.dk(),
                               .dv = workspace_.dv()};
    if (call.ragged) {
      write_table(context_, table, call, shape_);
      bind_table(operands, table);
    }
    attention_plans(context_).run(problem_of(call, shape_, true), operands, workspace_.plan(),
                                  workspace_.plan_bytes());
    write_key_gradients(context_,
                        {.dk = args_.dk.as<float>() + key,
                         .dv = args_.dv.as<float>() + key,
                         .dk_part = workspace_.dk(),
                         .dv_part = workspace_.dv(),
                         .store = stores_keys(call)},
                        table, call, shape_);
    if (is_sum) {
      sum_query_gradients(context_,
                          {.dq = dq,
                           .sum = workspace_.dq_sum(),
                           .part = workspace_.dq(),
                           .second = before_ == Part::first,
                           .last = call.query_gradient == Part::last},
                          call.query_rows() * shape_.query_stride());
    }
    before_ = call.query_gradient;
  }

  /// After the last call.
  void finish() {
    if (!args_.accumulate) clear_keys(written_.mark({0, args_.dk.dim(0)}));
  }

 private:
  /// Makes sure that rows to which the call's part is added have been written.
  bool stores_keys(const AttentionCall& call) {
    if (args_.accumulate) return false;
    const detail::WrittenKeys::Step step = written_.write(call);
    clear_keys(step.clear);
    return step.store;
  }

  void clear_keys(const std::vector<detail::Interval>& runs) const {
    for (const detail::Interval rows : runs) {
      fill_zero(context_, args_.dk.rows(rows.begin, rows.size()));
      fill_zero(context_, args_.dv.rows(rows.begin, rows.size()));
    }
  }

  void* prepared_lse(const AttentionCall& call) const {
    const auto* lse = args_.lse.as<float>();
    if (call.ragged) return const_cast<float*>(lse);
    transpose_lse(context_, workspace_.lse(), lse + call.first_query() * shape_.heads, call.batch,
                  call.queries, shape_.heads);
    return workspace_.lse();
  }

  const Context& context_;
  const AttentionBackward& args_;
  const AttentionShape& shape_;
  Workspace workspace_;
  detail::WrittenKeys written_;  // unless accumulating
  Part before_ = Part::whole;    // of the call before
};

}  // namespace

void cudnn_attention_forward(const Context& context, const AttentionForward& args,
                             std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  expect_aligned("attention_forward", {args.q, args.k, args.v, args.o});
  const Workspace workspace(context, shape.limits(args.q.dtype(), args.q.dim(0), args.k.dim(0), segments));
  for (const AttentionCall& call : detail::attention_forward_calls(segments)) {
    run_forward(context, args, call, shape, workspace);
  }
}

void cudnn_attention_backward(const Context& context, const AttentionBackward& args,
                              std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  expect_aligned("attention_backward",
                 {args.q, args.k, args.v, args.o, args.dout, args.dq, args.dk, args.dv});
  const detail::AttentionCost cost{shape.heads, shape.key_heads, shape.head_dim, shape.deterministic};
  BackwardPass pass(context, args, shape,
                    shape.limits(args.q.dtype(), args.q.dim(0), args.k.dim(0), segments));
  for (const AttentionCall& call : detail::attention_backward_calls(segments, cost)) {
    pass.run(call);
  }
  pass.finish();
}

std::size_t cudnn_attention_workspace(const AttentionLimits& limits) {
  return detail::AttentionWorkspaceLayout(limits).bytes;
}

}  // namespace layerstream::ops::cuda
