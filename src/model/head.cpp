#include "model/head.hpp"

#include <algorithm>

#include "ops/linear.hpp"
#include "ops/loss.hpp"
#include "ops/norm.hpp"

namespace layerstream {
namespace {

/// One tile of a pass: views of t' <= t tokens.
struct Tile {
  Tile(const HeadPass& pass, std::int64_t first, std::int64_t count)
      : x(pass.x.rows(first, count)),
        targets(pass.targets.rows(first, count)),
        normed(pass.scratch.normed.rows(0, count)),
        logits(pass.scratch.logits.rows(0, count)),
        nll(pass.scratch.nll.rows(0, count)) {}

  ConstTensorView x, targets;
  TensorView normed, logits, nll;
};

void write_logits(const ops::Context& context, const HeadPass& pass, ConstTensorView x, TensorView normed,
                  TensorView logits) {
  ops::rms_norm_forward(context, normed, x, pass.weights.norm, pass.spec.rms_norm_eps);
  ops::linear_forward(context, logits, normed, pass.weights.matrix);
}

template <class Function>
void for_each_tile(const HeadPass& pass, const Function& function) {
  const std::int64_t tile_tokens = pass.scratch.normed.dim(0);
  for (std::int64_t first = 0; first < pass.x.dim(0); first += tile_tokens) {
    function(first, std::min(tile_tokens, pass.x.dim(0) - first));
  }
}

}  // namespace

void head_loss(const ops::Context& context, const HeadPass& pass, double* nll_sum) {
  for_each_tile(pass, [&](std::int64_t first, std::int64_t count) {
    const Tile tile(pass, first, count);
    write_logits(context, pass, tile.x, tile.normed, tile.logits);
    ops::cross_entropy(context,
                       {.dlogits = {}, .nll = tile.nll, .logits = tile.logits, .targets = tile.targets});
    ops::add_sum(context, nll_sum, tile.nll);
  });
}

void head_loss_and_gradient(const ops::Context& context, const HeadPass& pass, double scale, TensorView dx,
                            const HeadGradients& gradients, double* nll_sum) {
  for_each_tile(pass, [&](std::int64_t first, std::int64_t count) {
    const Tile tile(pass, first, count);
    const TensorView dlogits = pass.scratch.dlogits.rows(0, count);
    const TensorView dnormed = pass.scratch.dnormed.rows(0, count);
    write_logits(context, pass, tile.x, tile.normed, tile.logits);
    ops::cross_entropy(context, {.dlogits = dlogits,
                                 .nll = tile.nll,
                                 .logits = tile.logits,
                                 .targets = tile.targets,
                                 .scale = scale});
    ops::add_sum(context, nll_sum, tile.nll);
    const bool accumulate = first > 0 || !pass.overwrites_matrix_gradient;
    if (gradients.matrix)
      ops::linear_backward_weight(context, gradients.matrix, dlogits, tile.normed, accumulate);
    ops::linear_backward_input(context, dnormed, dlogits, pass.weights.matrix);
    ops::rms_norm_backward(context, {.dx = dx.rows(first, count),
                                     .dweight = gradients.norm,
                                     .dy = dnormed,
                                     .x = tile.x,
                                     .weight = pass.weights.norm,
                                     .residual = {},
                                     .eps = pass.spec.rms_norm_eps});
  });
}

void head_logits(const ops::Context& context, const HeadPass& pass, TensorView logits) {
  write_logits(context, pass, pass.x, pass.scratch.normed.rows(0, pass.x.dim(0)), logits);
}

std::size_t head_workspace(const ModelSpec& spec, std::int64_t tile_tokens, DType compute) {
  return std::max(ops::linear_workspace(compute),
                  ops::rms_norm_backward_workspace(tile_tokens, spec.hidden_size, compute));
}

}  // namespace layerstream
