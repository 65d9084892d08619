#include "ops/cuda/attention_graph.hpp"

#include <vector>

namespace layerstream::ops::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using fe::graph::Tensor_attributes;
using Tensor = std::shared_ptr<Tensor_attributes>;
using Extents = std::vector<std::int64_t>;

class GraphBuilder {
 public:
  explicit GraphBuilder(const AttentionProblem& problem) : problem_(problem) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (!problem.ragged) return;
    const std::int64_t batch = problem.batch;
    query_offsets_ = index(AttentionTensor::query_offsets, batch + 1, fe::DataType_t::INT64);
    key_offsets_ = index(AttentionTensor::key_offsets, batch + 1, fe::DataType_t::INT64);
    lse_offsets_ = index(AttentionTensor::lse_offsets, batch + 1, fe::DataType_t::INT64);
    query_lengths_ = index(AttentionTensor::query_lengths, batch, fe::DataType_t::INT32);
    key_lengths_ = index(AttentionTensor::key_lengths, batch, fe::DataType_t::INT32);
  }

  std::shared_ptr<Graph> forward() {
    auto attributes = fe::graph::SDPA_attributes().set_name("forward").set_generate_stats(true);
    set_common(attributes);
    auto [o, lse] = graph_->sdpa(input(AttentionTensor::q), input(AttentionTensor::k),
                                 input(AttentionTensor::v), attributes);
    o->set_output(true);
    describe(*o, AttentionTensor::o);
    lse->set_output(true);
    describe(*lse, AttentionTensor::lse);
    return graph_;
  }

  std::shared_ptr<Graph> backward() {
    auto attributes = fe::graph::SDPA_backward_attributes()
                          .set_name("backward")
                          .set_deterministic_algorithm(problem_.deterministic);
    set_common(attributes);
    auto [dq, dk, dv] = graph_->sdpa_backward(
        input(AttentionTensor::q), input(AttentionTensor::k), input(AttentionTensor::v),
        input(AttentionTensor::o), input(AttentionTensor::dout), input(AttentionTensor::lse), attributes);
    dq->set_output(true);
    describe(*dq, AttentionTensor::dq);
    dk->set_output(true);
    describe(*dk, AttentionTensor::dk);
    dv->set_output(true);
    describe(*dv, AttentionTensor::dv);
    return graph_;
  }

 private:
  template <class Attributes>
  void set_common(Attributes& attributes) const {
    attributes.set_attn_scale(problem_.scale);
    if (problem_.mask != detail::AttentionMask::none) {
      attributes
          .set_diagonal_alignment(problem_.mask == detail::AttentionMask::bottom_right
                                      ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                      : fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0);
    }
    // Keeps keys with key + bound > query (both counted along the diagonal): `window` keys with the own one.
    if (problem_.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(problem_.window));
    if (problem_.ragged) {
      attributes.set_padding_mask(true).set_seq_len_q(query_lengths_).set_seq_len_kv(key_lengths_);
    }
  }

  Tensor index(AttentionTensor id, std::int64_t count, fe::DataType_t type) const {
    return graph_->tensor(Tensor_attributes()
                              .set_uid(static_cast<std::int64_t>(id))
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }

  Tensor input(AttentionTensor id) const {
    Tensor_attributes attributes;
    describe(attributes, id);
    return graph_->tensor(attributes);
  }

  /// Our rows (tokens, heads, d) in the order of cuDNN's extents (batch, heads, tokens, d).
  void describe(Tensor_attributes& tensor, AttentionTensor id) const {
    tensor.set_uid(static_cast<std::int64_t>(id));
    if (id == AttentionTensor::lse) {
      describe_lse(tensor);
      return;
    }
    const bool of_keys = id == AttentionTensor::k || id == AttentionTensor::v || id == AttentionTensor::dk ||
                         id == AttentionTensor::dv;
    const std::int64_t heads = of_keys ? problem_.key_heads : problem_.heads;
    const std::int64_t tokens = of_keys ? problem_.keys : problem_.queries, d = problem_.head_dim;
    tensor.set_dim({problem_.batch, heads, tokens, d}).set_stride({tokens * heads * d, d, heads * d, 1});
    if (problem_.ragged) tensor.set_ragged_offset(of_keys ? key_offsets_ : query_offsets_);
  }

  void describe_lse(Tensor_attributes& tensor) const {
    const std::int64_t heads = problem_.heads, queries = problem_.queries;
    // Before cuDNN 9.26, backward reads an lse that is not ragged in this order only.
    const bool head_major = problem_.backward && !problem_.ragged;
    tensor.set_dim({problem_.batch, heads, queries, 1})
        .set_stride(head_major ? Extents{heads * queries, queries, 1, 1}
                               : Extents{heads * queries, 1, heads, 1})
        .set_data_type(fe::DataType_t::FLOAT);
    if (problem_.ragged) tensor.set_ragged_offset(lse_offsets_);
  }

  const AttentionProblem& problem_;
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  Tensor query_offsets_, key_offsets_, lse_offsets_, query_lengths_, key_lengths_;
};

}  // namespace

std::shared_ptr<Graph> make_attention_graph(const AttentionProblem& problem) {
  GraphBuilder builder(problem);
  return problem.backward ? builder.backward() : builder.forward();
}

}  // namespace layerstream::ops::cuda
