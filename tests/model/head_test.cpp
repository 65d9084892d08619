// Final norm and LM head in FP64: tiles of any size give one loss and one gradient, which are those of
// finite differences.

#include <gtest/gtest.h>

#include <cmath>

#include "model/head.hpp"
#include "tests/support/finite_difference.hpp"
#include "tests/support/random_tensor.hpp"
#include "tests/support/shared_libraries.hpp"

namespace layerstream::test {
namespace {

constexpr std::int64_t num_tokens = 13;

ModelSpec small_spec() {
  ModelSpec spec;
  spec.vocab_size = 17;
  spec.hidden_size = 10;
  spec.rms_norm_eps = 1e-5;
  return spec;
}

/// The head's inputs; every third target is missing, and so is the whole tile of tokens 6 to 8.
struct Inputs {
  ModelSpec spec = small_spec();
  OwnedTensor x = normal_tensor(DType::f64, {num_tokens, spec.hidden_size}, 1);
  OwnedTensor norm = normal_tensor(DType::f64, {spec.hidden_size}, 2, 0.2, 1.0);
  OwnedTensor matrix = normal_tensor(DType::f64, {spec.vocab_size, spec.hidden_size}, 3, 0.5);
  OwnedTensor targets = integer_tensor({num_tokens}, spec.vocab_size, 4);

  Inputs() {
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      if (t % 3 == 2 || (t >= 6 && t < 9)) targets.set(t, -100);
    }
  }
};

/// The buffers of one tile, poisoned, and a workspace of exactly the promised size.
struct TileBuffers {
  TileBuffers(const ModelSpec& spec, std::int64_t tile)
      : normed(DType::f64, {tile, spec.hidden_size}),
        dnormed(DType::f64, {tile, spec.hidden_size}),
        logits(DType::f64, {tile, spec.vocab_size}),
        dlogits(DType::f64, {tile, spec.vocab_size}),
        nll(DType::f64, {tile}),
        workspace(DType::u8, {static_cast<std::int64_t>(head_workspace(spec, tile, DType::f64))}) {}

  HeadScratch scratch() {
    return {.normed = normed, .dnormed = dnormed, .logits = logits, .dlogits = dlogits, .nll = nll};
  }
  ops::Context context() {
    return {.stream = StreamView::host(),
            .workspace = workspace.view().data(),
            .workspace_bytes = workspace.bytes(),
            .libraries = shared_libraries()};
  }

  OwnedTensor normed, dnormed, logits, dlogits, nll, workspace;
};

/// Calls function(context, pass) with tiles of `tile` tokens.
template <class Function>
void with_pass(const Inputs& inputs, std::int64_t tile, const Function& function) {
  TileBuffers buffers(inputs.spec, tile);
  const HeadWeights weights{.norm = inputs.norm, .matrix = inputs.matrix};
  function(buffers.context(), HeadPass{.spec = inputs.spec,
                                       .weights = weights,
                                       .x = inputs.x,
                                       .targets = inputs.targets,
                                       .scratch = buffers.scratch()});
}

double loss_of(const Inputs& inputs, std::int64_t tile) {
  OwnedTensor nll_sum = constant_tensor(DType::f64, {1}, 0.0);
  with_pass(inputs, tile, [&](const ops::Context& context, const HeadPass& pass) {
    head_loss(context, pass, nll_sum.view().as<double>());
  });
  return nll_sum[0];
}

struct HeadResult {
  OwnedTensor nll_sum;  // (1)
  OwnedTensor dx, dnorm, dmatrix;
};

/// The gradient of scale · nll_sum.
HeadResult gradient_of(const Inputs& inputs, std::int64_t tile, double scale) {
  HeadResult result{constant_tensor(DType::f64, {1}, 0.0), OwnedTensor(DType::f64, inputs.x.shape()),
                    constant_tensor(DType::f64, inputs.norm.shape(), 0.0),
                    constant_tensor(DType::f64, inputs.matrix.shape(), 0.0)};
  with_pass(inputs, tile, [&](const ops::Context& context, const HeadPass& pass) {
    head_loss_and_gradient(context, pass, scale, result.dx, {.norm = result.dnorm, .matrix = result.dmatrix},
                           result.nll_sum.view().as<double>());
  });
  return result;
}

void expect_close(const OwnedTensor& actual, const OwnedTensor& expected, double tolerance) {
  double largest = 0.0;
  for (std::int64_t i = 0; i < expected.numel(); ++i) largest = std::max(largest, std::fabs(expected[i]));
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    ASSERT_LE(std::fabs(actual[i] - expected[i]), tolerance * largest) << "element " << i;
  }
}

TEST(Head, TilesOfAnySizeGiveTheSameLossAndGradient) {
  const Inputs inputs;
  const HeadResult whole = gradient_of(inputs, num_tokens, 0.125);
  // Sums of 13 FP64 terms in another order differ by some 1e-16 · 13.
  constexpr double tolerance = 1e-12;
  for (const std::int64_t tile : {1, 3, 4, 12, 20}) {
    SCOPED_TRACE(fmt::format("tiles of {}", tile));
    const HeadResult tiled = gradient_of(inputs, tile, 0.125);
    EXPECT_NEAR(tiled.nll_sum[0], whole.nll_sum[0], tolerance * whole.nll_sum[0]);
    expect_close(tiled.dx, whole.dx, tolerance);
    expect_close(tiled.dnorm, whole.dnorm, tolerance);
    expect_close(tiled.dmatrix, whole.dmatrix, tolerance);
    EXPECT_EQ(loss_of(inputs, tile), tiled.nll_sum[0]);
  }
}

TEST(Head, GradientEqualsFiniteDifferences) {
  Inputs inputs;
  constexpr double scale = 0.25;
  const HeadResult result = gradient_of(inputs, 4, scale);
  const auto objective = [&] { return scale * loss_of(inputs, 4); };
  // Truncation of the five-point difference, 3e-14 times the fifth derivative; see finite_difference.hpp.
  constexpr double tolerance = 1e-9;
  expect_gradient(inputs.x, result.dx, objective, tolerance);
  expect_gradient(inputs.norm, result.dnorm, objective, tolerance);
  expect_gradient(inputs.matrix, result.dmatrix, objective, tolerance);
}

TEST(Head, GradientsAndLossAreAddedToWhatIsThere) {
  const Inputs inputs;
  const HeadResult once = gradient_of(inputs, 5, 1.0);
  HeadResult twice = gradient_of(inputs, 5, 1.0);
  with_pass(inputs, 5, [&](const ops::Context& context, const HeadPass& pass) {
    head_loss_and_gradient(context, pass, 1.0, twice.dx, {.norm = twice.dnorm, .matrix = twice.dmatrix},
                           twice.nll_sum.view().as<double>());
  });
  const auto doubled = [](const OwnedTensor& tensor) {
    return tensor.mapped(DType::f64, [](double value) { return 2.0 * value; });
  };
  EXPECT_NEAR(twice.nll_sum[0], 2.0 * once.nll_sum[0], 1e-12 * once.nll_sum[0]);
  expect_close(twice.dnorm, doubled(once.dnorm), 1e-12);
  expect_close(twice.dmatrix, doubled(once.dmatrix), 1e-12);
  EXPECT_TRUE(twice.dx.same_bits(once.dx));  // written, not added to
}

TEST(Head, InputGradientMayReplaceTheInput) {
  Inputs inputs;
  const HeadResult apart = gradient_of(inputs, 4, 1.0);
  OwnedTensor dnorm = constant_tensor(DType::f64, inputs.norm.shape(), 0.0);
  OwnedTensor dmatrix = constant_tensor(DType::f64, inputs.matrix.shape(), 0.0);
  OwnedTensor nll_sum = constant_tensor(DType::f64, {1}, 0.0);
  with_pass(inputs, 4, [&](const ops::Context& context, const HeadPass& pass) {
    head_loss_and_gradient(context, pass, 1.0, inputs.x, {.norm = dnorm, .matrix = dmatrix},
                           nll_sum.view().as<double>());
  });
  EXPECT_TRUE(inputs.x.same_bits(apart.dx));
  EXPECT_TRUE(dnorm.same_bits(apart.dnorm));
  EXPECT_TRUE(dmatrix.same_bits(apart.dmatrix));
}

TEST(Head, LogitsAreThoseOfTheLoss) {
  const Inputs inputs;
  OwnedTensor logits(DType::f64, {num_tokens, inputs.spec.vocab_size});
  with_pass(inputs, num_tokens,
            [&](const ops::Context& context, const HeadPass& pass) { head_logits(context, pass, logits); });
  double nll_sum = 0.0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const auto target = static_cast<std::int64_t>(inputs.targets[t]);
    if (target < 0) continue;
    double sum = 0.0;
    for (std::int64_t v = 0; v < inputs.spec.vocab_size; ++v) {
      sum += std::exp(logits[t * inputs.spec.vocab_size + v]);
    }
    nll_sum += std::log(sum) - logits[t * inputs.spec.vocab_size + target];
  }
  EXPECT_NEAR(loss_of(inputs, 4), nll_sum, 1e-12 * nll_sum);
}

TEST(Head, TokensWithoutTargetHaveNoGradient) {
  const Inputs inputs;
  const HeadResult result = gradient_of(inputs, 4, 1.0);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const bool has_target = inputs.targets[t] >= 0;
    for (std::int64_t i = 0; i < inputs.spec.hidden_size; ++i) {
      EXPECT_EQ(result.dx[t * inputs.spec.hidden_size + i] != 0.0, has_target) << "token " << t;
    }
  }
}

}  // namespace
}  // namespace layerstream::test
