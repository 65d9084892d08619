#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "longctx/chunk_plan.hpp"
#include "longctx/rope.hpp"
#include "model/decoder.hpp"
#include "model/layout.hpp"
#include "tests/support/finite_difference.hpp"
#include "tests/support/random_tensor.hpp"
#include "tests/support/shared_libraries.hpp"

namespace layerstream::test {

/// Rows of the given lengths; every row starts a document at 0 and at those of `document_starts` that lie
/// within it. Ids and targets do not matter to a decoder layer.
inline std::vector<TokenRow> rows_of_lengths(std::span<const std::int64_t> lengths,
                                             std::span<const std::int64_t> document_starts = {}) {
  std::vector<TokenRow> rows;
  for (const std::int64_t length : lengths) {
    TokenRow row;
    row.input_ids.assign(static_cast<std::size_t>(length), 0);
    row.targets.assign(static_cast<std::size_t>(length), -100);
    row.document_starts.push_back(0);
    for (const std::int64_t start : document_starts) {
      if (start > 0 && start < length) row.document_starts.push_back(start);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

/// How the backward pass comes by the intermediates of the forward pass.
struct SavingMode {
  std::string name;
  SavedIntermediates saved;
  /// Keys and values are rebuilt from saved projections (they live on the device) or from the input.
  bool rebuild_from_saved = false;
};

inline std::vector<SavingMode> saving_modes() {
  return {{"recompute", {}, false},
          {"attention", {.attention = true, .projections = false}, false},
          {"all_on_host", {.attention = true, .projections = true}, false},
          {"all_on_device", {.attention = true, .projections = true}, true}};
}

/// A decoder layer in FP64 with random weights.
struct DecoderLayer {
  explicit DecoderLayer(const ModelSpec& model, std::int64_t layer_index = 0)
      : spec(model),
        layer(layer_index),
        block(make_layout(model).blocks.at(static_cast<std::size_t>(layer_index + 1))),
        slab(DType::f64, {block.num_elements}) {
    std::uint64_t stream = 0;
    for (const Parameter& parameter : block.parameters) {
      // Norm weights near one; matrices such that activations keep their size.
      const bool norm = parameter.name.find("norm") != std::string::npos;
      const double scale =
          parameter.is_matrix ? 1.0 / std::sqrt(static_cast<double>(parameter.shape[1])) : 0.2;
      for (std::int64_t i = 0; i < parameter.numel(); ++i) {
        slab.set(parameter.offset + i,
                 (norm ? 1.0 : 0.0) + scale * normal_at(91, stream, static_cast<std::uint64_t>(i)));
      }
      ++stream;
    }
  }

  ModelSpec spec;
  std::int64_t layer;
  BlockLayout block;
  OwnedTensor slab;  ///< (elements of the block); padding stays NaN
};

struct DecoderResult {
  OwnedTensor y;          ///< (T, h)
  OwnedTensor dx;         ///< (T, h)
  OwnedTensor gradients;  ///< (elements of the block)
};

/// Owns exactly the buffers that a step has for one decoder layer, all poisoned, and takes the rows of a
/// plan through it group by group in the order of the schedule.
class DecoderHarness {
 public:
  DecoderHarness(const DecoderLayer& layer, std::span<const TokenRow> rows, std::int64_t chunk_tokens)
      : layer_(layer),
        plan_(make_chunk_plan(rows, chunk_tokens)),
        positions_(DType::i32, {plan_.num_tokens()}),
        cos_(DType::f64, {plan_.max_position, layer.spec.head_dim / 2}),
        sin_(DType::f64, {plan_.max_position, layer.spec.head_dim / 2}) {
    for (const Chunk& chunk : plan_.chunks) longest_chunk_ = std::max(longest_chunk_, chunk.num_tokens);
    for (const ChunkGroup& group : plan_.groups) longest_group_ = std::max(longest_group_, group.num_tokens);
    // Of exactly the promised size.
    workspace_.emplace(DType::u8, Shape{static_cast<std::int64_t>(decoder_workspace(
                                      layer.spec, longest_chunk_, plan_.num_tokens(), DType::f64, true))});
    for (std::int64_t t = 0; t < plan_.num_tokens(); ++t) {
      positions_.set(t, plan_.positions[static_cast<std::size_t>(t)]);
    }
    std::int64_t longest_row = 0;
    for (const TokenRow& row : rows) longest_row = std::max(longest_row, row.num_tokens());
    const RopeFrequencies frequencies = rope_frequencies(layer.spec.rope, layer.spec.head_dim,
                                                         layer.spec.max_position_embeddings, longest_row);
    fill_rope_tables(cos_, sin_, frequencies, RopePrecision::exact);
  }

  const ChunkPlan& plan() const { return plan_; }

  /// The layer's output. @param x (T, h)
  OwnedTensor forward(const OwnedTensor& x) {
    OwnedTensor y(DType::f64, x.shape());
    forward_groups(x, y, SavedIntermediates{});
    return y;
  }

  /// Forward and backward with the gradient `dy` (T, h) of the output.
  DecoderResult run(const OwnedTensor& x, const OwnedTensor& dy, const SavingMode& mode) {
    DecoderResult result{OwnedTensor(DType::f64, x.shape()), OwnedTensor(dy),
                         constant_tensor(DType::f64, layer_.slab.shape(), 0.0)};
    const DecoderIntermediates saved = forward_groups(x, result.y, mode.saved);
    const DecoderGradients gradients =
        bind_decoder_gradients(layer_.spec, layer_.block, result.gradients.view().data(), DType::f64);
    for (const ChunkGroup& group : plan_.groups) {
      const Buffers buffers = make_buffers();
      const int end = group.first_chunk + group.num_chunks;
      for (int c = group.first_chunk; c < end; ++c) {
        SavedIntermediates ready = mode.saved;
        ready.projections = mode.rebuild_from_saved;
        const DecoderIntermediates kept = mode.rebuild_from_saved ? saved : DecoderIntermediates{};
        with_pass(x, buffers, kept, c, [&](const ops::Context& context, const DecoderPass& pass) {
          decoder_rebuild_key_value(context, pass, ready);
        });
      }
      for (int c = end - 1; c >= group.first_chunk; --c) {
        const Chunk& chunk = plan_.chunks[static_cast<std::size_t>(c)];
        with_pass(x, buffers, saved, c, [&](const ops::Context& context, DecoderPass pass) {
          pass.overwrites_key_gradients = c == end - 1;
          decoder_backward(context, pass, mode.saved,
                           result.dx.view().rows(chunk.first_token, chunk.num_tokens), gradients);
        });
      }
    }
    return result;
  }

 private:
  /// Buffers whose content must not outlive a group.
  struct Buffers {
    DecoderIntermediates intermediates;  ///< for one chunk
    GroupKeyValue group;
    DecoderScratch scratch;
  };

  TensorView fresh(Shape shape) {
    memory_.push_back(OwnedTensor(DType::f64, shape));
    return memory_.back().view();
  }

  Buffers make_buffers() {
    const ModelSpec& spec = layer_.spec;
    const std::int64_t chunk = longest_chunk_;
    const Shape query{chunk, spec.num_attention_heads, spec.head_dim};
    const Shape key{longest_group_, spec.num_key_value_heads, spec.head_dim};
    Buffers buffers{
        .intermediates = make_intermediates(chunk, {.attention = true, .projections = true}),
        .group = {.key = fresh(key), .value = fresh(key), .dkey = fresh(key), .dvalue = fresh(key)},
        .scratch = {.normed = fresh({chunk, spec.hidden_size}),
                    .query = fresh(query),
                    .activation = fresh({chunk, spec.intermediate_size}),
                    .dhidden = fresh({chunk, spec.hidden_size}),
                    .dattention = fresh(query),
                    .dquery = fresh(query),
                    .dquery_key_value = fresh({chunk, spec.query_size() + 2 * spec.key_value_size()})}};
    // With a norm on the keys the backward pass of a chunk reads what the rebuild of the group wrote.
    if (spec.qk_norm) {
      buffers.intermediates.key_value_raw = fresh({longest_group_, 2 * spec.key_value_size()});
    }
    return buffers;
  }

  DecoderIntermediates make_intermediates(std::int64_t tokens, const SavedIntermediates& which) {
    const ModelSpec& spec = layer_.spec;
    DecoderIntermediates set;
    if (which.attention) {
      set.attention = fresh({tokens, spec.num_attention_heads, spec.head_dim});
      set.lse = fresh({tokens, spec.num_attention_heads});
    }
    if (which.projections) {
      set.query_raw = fresh({tokens, spec.query_size()});
      set.key_value_raw = fresh({tokens, 2 * spec.key_value_size()});
      set.residual = fresh({tokens, spec.hidden_size});
      set.gate_up = fresh({tokens, 2 * spec.intermediate_size});
    }
    return set;
  }

  DecoderIntermediates forward_groups(const OwnedTensor& x, OwnedTensor& y, const SavedIntermediates& which) {
    memory_.clear();
    const DecoderIntermediates saved = make_intermediates(plan_.num_tokens(), which);
    for (const ChunkGroup& group : plan_.groups) {
      const Buffers buffers = make_buffers();
      for (int c = group.first_chunk; c < group.first_chunk + group.num_chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<std::size_t>(c)];
        with_pass(x, buffers, saved, c, [&](const ops::Context& context, const DecoderPass& pass) {
          decoder_forward(context, pass, y.view().rows(chunk.first_token, chunk.num_tokens));
        });
      }
    }
    return saved;
  }

  /// Calls function(context, pass) for a chunk; `saved` views take the place of scratch where present.
  template <class Function>
  void with_pass(const OwnedTensor& x, const Buffers& buffers, const DecoderIntermediates& saved,
                 int chunk_index, const Function& function) {
    const ModelSpec& spec = layer_.spec;
    const Chunk& chunk = plan_.chunks[static_cast<std::size_t>(chunk_index)];
    const std::int64_t n = chunk.num_tokens;
    const auto head_rows = [n](const TensorView& view) { return view.rows(0, n); };
    const auto choose = [&](TensorView DecoderIntermediates::*member) {
      if (saved.*member) return (saved.*member).rows(chunk.first_token, n);
      const bool spans_group = spec.qk_norm && member == &DecoderIntermediates::key_value_raw;
      return (buffers.intermediates.*member).rows(spans_group ? chunk.offset_in_group : 0, n);
    };
    const DecoderWeights weights =
        bind_decoder_weights(spec, layer_.block, layer_.slab.view().data(), DType::f64,
                             layer_.slab.as<double>() + layer_.block.num_matrix_elements, DType::f64);
    const DecoderScratch& scratch = buffers.scratch;
    const DecoderPass pass{.spec = spec,
                           .layer = layer_.layer,
                           .weights = weights,
                           .chunk = chunk,
                           .rope = {.cos = cos_, .sin = sin_},
                           .positions = positions_.view().rows(chunk.first_token, n),
                           .x = x.view().rows(chunk.first_token, n),
                           .intermediates = {.query_raw = choose(&DecoderIntermediates::query_raw),
                                             .key_value_raw = choose(&DecoderIntermediates::key_value_raw),
                                             .attention = choose(&DecoderIntermediates::attention),
                                             .lse = choose(&DecoderIntermediates::lse),
                                             .residual = choose(&DecoderIntermediates::residual),
                                             .gate_up = choose(&DecoderIntermediates::gate_up)},
                           .group = buffers.group,
                           .scratch = {.normed = head_rows(scratch.normed),
                                       .query = head_rows(scratch.query),
                                       .activation = head_rows(scratch.activation),
                                       .dhidden = head_rows(scratch.dhidden),
                                       .dattention = head_rows(scratch.dattention),
                                       .dquery = head_rows(scratch.dquery),
                                       .dquery_key_value = head_rows(scratch.dquery_key_value)}};
    function(ops::Context{.stream = StreamView::host(),
                          .workspace = workspace_->view().data(),
                          .workspace_bytes = workspace_->bytes(),
                          .libraries = shared_libraries()},
             pass);
  }

  const DecoderLayer& layer_;
  ChunkPlan plan_;
  OwnedTensor positions_, cos_, sin_;
  std::int64_t longest_chunk_ = 0;
  std::int64_t longest_group_ = 0;
  std::optional<OwnedTensor> workspace_;
  std::vector<OwnedTensor> memory_;
};

/// Largest |a − b| over the elements given by `count` and `offset`, relative to the largest |b|; NaN when
/// any element is.
inline double relative_distance(const OwnedTensor& a, const OwnedTensor& b, std::int64_t offset,
                                std::int64_t count) {
  double distance = 0.0;
  double largest = 0.0;
  for (std::int64_t i = offset; i < offset + count; ++i) {
    const double difference = std::fabs(a[i] - b[i]);
    if (!(difference <= distance)) distance = difference;  // lets NaN in, and not out
    if (std::isnan(difference)) return difference;
    largest = std::max(largest, std::fabs(b[i]));
  }
  return distance / largest;
}

inline double relative_distance(const OwnedTensor& a, const OwnedTensor& b) {
  return relative_distance(a, b, 0, b.numel());
}

/// Expects y, dx and the gradient of each parameter within `tolerance`, relative to the largest of each.
inline void expect_same_result(const DecoderLayer& layer, const DecoderResult& actual,
                               const DecoderResult& expected, double tolerance) {
  EXPECT_LE(relative_distance(actual.y, expected.y), tolerance) << "y";
  EXPECT_LE(relative_distance(actual.dx, expected.dx), tolerance) << "dx";
  for (const Parameter& parameter : layer.block.parameters) {
    EXPECT_LE(relative_distance(actual.gradients, expected.gradients, parameter.offset, parameter.numel()),
              tolerance)
        << parameter.name;
  }
}

/// Expects the gradients of sum(w · y) to be its finite differences, for the input and every parameter. The
/// harness' rows have `tokens` tokens.
inline void expect_finite_difference_gradients(DecoderLayer& layer, DecoderHarness& harness,
                                               std::int64_t tokens) {
  OwnedTensor x = normal_tensor(DType::f64, {tokens, layer.spec.hidden_size}, 1);
  const OwnedTensor w = normal_tensor(DType::f64, x.shape(), 2);
  const DecoderResult result = harness.run(x, w, saving_modes().front());
  const auto objective = [&] { return dot(harness.forward(x), w); };
  // Truncation of the difference, 3e-14 times the fifth derivative, which norms and softmax make large:
  // 1.2e-10 is the worst of all variants.
  constexpr double tolerance = 1e-8;
  expect_gradient(x, result.dx, objective, tolerance);
  for (const Parameter& parameter : layer.block.parameters) {
    OwnedTensor numeric = constant_tensor(DType::f64, layer.slab.shape(), 0.0);
    for (std::int64_t i = parameter.offset; i < parameter.offset + parameter.numel(); ++i) {
      numeric.set(i, finite_difference(layer.slab, i, objective));
    }
    EXPECT_LE(relative_distance(result.gradients, numeric, parameter.offset, parameter.numel()), tolerance)
        << parameter.name;
  }
}

}  // namespace layerstream::test
