#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "ops/elementwise.hpp"
#include "ops/embedding.hpp"
#include "ops/heads.hpp"
#include "ops/linear.hpp"
#include "ops/loss.hpp"
#include "ops/norm.hpp"
#include "tests/ops/ops_test.hpp"

/// A device reads 16 bytes at a time where memory allows it, and element by element elsewhere: results must
/// not tell. Sizes are those of real layers or odd parts of them, so that every lane of a team has work.
namespace layerstream::ops {
namespace {

using namespace layerstream::test;

constexpr DType compute_dtypes[] = {DType::f64, DType::f32, DType::bf16};

/// A tensor that begins `shift` elements after an aligned address.
class Shifted {
 public:
  Shifted(DType dtype, Shape shape, std::int64_t shift)
      : memory_(dtype, {shape.numel() + shift}),
        view_(
            static_cast<std::byte*>(memory_.view().data()) + static_cast<std::size_t>(shift) * size_of(dtype),
            dtype, shape) {}
  Shifted(const OwnedTensor& source, std::int64_t shift) : Shifted(source.dtype(), source.shape(), shift) {
    std::memcpy(view_.data(), source.view().data(), source.bytes());
  }

  operator TensorView() { return view_; }       // NOLINT(google-explicit-constructor)
  operator ConstTensorView() { return view_; }  // NOLINT(google-explicit-constructor)

  OwnedTensor values() const {
    wait_for_device();
    OwnedTensor result(view_.dtype(), view_.shape());
    std::memcpy(result.view().data(), view_.data(), result.bytes());
    return result;
  }

 private:
  OwnedTensor memory_;
  TensorView view_;
};

/// Expects the same results from run(0), all aligned, and run(1), nothing aligned.
template <class Run>
void expect_alignment_invisible(const Run& run) {
  const std::vector<OwnedTensor> aligned = run(0), shifted = run(1);
  ASSERT_EQ(aligned.size(), shifted.size());
  for (std::size_t i = 0; i < aligned.size(); ++i)
    EXPECT_TRUE(aligned[i].same_bits(shifted[i])) << "result " << i;
}

template <class... Tensors>
std::vector<OwnedTensor> values_of(const Tensors&... tensors) {
  std::vector<OwnedTensor> values;
  (values.push_back(tensors.values()), ...);
  return values;
}

TEST(Alignment, IsInvisibleInElementwiseResults) {
  for (const DType dtype : compute_dtypes) {
    expect_alignment_invisible([&](std::int64_t shift) {
      Shifted a(normal_tensor(dtype, {9, 1184}, 1), shift), b(normal_tensor(dtype, {9, 1184}, 2), shift);
      Shifted bias(normal_tensor(accumulator_of(dtype), {1184}, 3), shift);
      Shifted sum(dtype, {9, 1184}, shift), act(dtype, {9, 592}, shift), dgate_up(dtype, {9, 1184}, shift);
      Shifted dbias(constant_tensor(accumulator_of(dtype), {1184}, 0.5), shift);
      add(no_workspace(), sum, a, b);
      add_bias(no_workspace(), sum, bias);
      bias_backward(no_workspace(), dbias, a);
      swiglu_forward(no_workspace(), act, a);
      swiglu_backward(no_workspace(), dgate_up, act, b);
      return values_of(sum, act, dgate_up, dbias);
    });
  }
}

// A device sums columns of that many rows in clusters of blocks. Columns of several tiles, the last one
// partial.
TEST(Alignment, IsInvisibleInSumsOfManyRows) {
  for (const DType dtype : compute_dtypes) {
    expect_alignment_invisible([&](std::int64_t shift) {
      Shifted dy(normal_tensor(dtype, {2311, 296}, 1), shift);
      Shifted dbias(constant_tensor(accumulator_of(dtype), {296}, 0.5), shift);
      bias_backward(no_workspace(), dbias, dy);
      return values_of(dbias);
    });
  }
}

TEST(Alignment, IsInvisibleInMergedHalvesAndSquares) {
  expect_alignment_invisible([](std::int64_t shift) {
    Shifted hi(normal_tensor(DType::bf16, {40003}, 1), shift),
        lo(integer_tensor({40003}, 60000, 2).to(DType::i16), shift);
    Shifted merged(DType::f32, {40003}, shift), squares(DType::f64, {1}, shift);
    Shifted x(normal_tensor(DType::f32, {40004}, 3), shift);
    Scratch scratch(sum_of_squares_workspace(40004));
    merge_halves(no_workspace(), merged, hi, lo);
    sum_of_squares(scratch, static_cast<TensorView>(squares).as<double>(), x);
    return values_of(merged, squares);
  });
}

TEST(Alignment, IsInvisibleInNorms) {
  for (const DType dtype : compute_dtypes) {
    // Lanes without a piece, all lanes with two, rows longer than the lanes of a block can keep. 2,500
    // tokens: a block of a device has more rows than it holds at once.
    for (const auto& [tokens, hidden_size] :
         {std::pair<std::int64_t, std::int64_t>{21, 64}, {2500, 608}, {21, 3584}, {21, 8192}, {21, 10240}}) {
      const DType accumulator = accumulator_of(dtype);
      expect_alignment_invisible([&, tokens = tokens, hidden_size = hidden_size](std::int64_t shift) {
        const Shape shape{tokens, hidden_size};
        Shifted x(normal_tensor(dtype, shape, 1), shift), dy(normal_tensor(dtype, shape, 2), shift);
        Shifted residual(normal_tensor(dtype, shape, 3), shift);
        Shifted weight(normal_tensor(accumulator, {hidden_size}, 4), shift);
        Shifted y(dtype, shape, shift), dx(dtype, shape, shift), again(dtype, shape, shift);
        Shifted dweight(constant_tensor(accumulator, {hidden_size}, 0.0), shift);
        Scratch scratch(rms_norm_backward_workspace(tokens, hidden_size, dtype));
        rms_norm_forward(scratch, y, x, weight, 1e-6);
        rms_norm_backward(scratch, {.dx = dx,
                                    .dweight = dweight,
                                    .y = again,
                                    .dy = dy,
                                    .x = x,
                                    .weight = weight,
                                    .residual = residual,
                                    .eps = 1e-6});
        return values_of(y, dx, dweight, again);
      });
    }
  }
}

TEST(Alignment, IsInvisibleInHeads) {
  for (const DType dtype : compute_dtypes) {
    for (const std::int64_t head_dim : {80, 128, 256}) {
      const DType accumulator = accumulator_of(dtype);
      constexpr std::int64_t tokens = 37, heads = 3;
      const std::int64_t width = heads * head_dim, stride = width + 64;
      expect_alignment_invisible([&](std::int64_t shift) {
        Shifted raw(normal_tensor(dtype, {tokens, stride}, 1), shift);
        Shifted bias(normal_tensor(accumulator, {width}, 2), shift),
            weight(normal_tensor(accumulator, {head_dim}, 3), shift);
        Shifted cos(normal_tensor(accumulator, {50, head_dim / 2}, 4), shift);
        Shifted sin(normal_tensor(accumulator, {50, head_dim / 2}, 5), shift);
        Shifted dout(normal_tensor(dtype, {tokens, heads, head_dim}, 6), shift);
        const OwnedTensor positions = integer_tensor({tokens}, 50, 7);
        Shifted out(dtype, {tokens, heads, head_dim}, shift);
        Shifted draw(constant_tensor(dtype, {tokens, stride}, 0.0), shift);
        Shifted dbias(constant_tensor(accumulator, {width}, 0.0), shift);
        Shifted dweight(constant_tensor(accumulator, {head_dim}, 0.0), shift);
        const HeadTransform transform{.bias = bias,
                                      .norm_weight = weight,
                                      .norm_eps = 1e-6,
                                      .cos = cos,
                                      .sin = sin,
                                      .positions = positions};
        const HeadColumns columns{stride, 32};
        Scratch scratch(head_transform_backward_workspace(tokens, heads, head_dim, dtype));
        head_transform_forward(scratch, out, raw, columns, transform);
        head_transform_backward(scratch,
                                {.draw = draw,
                                 .draw_columns = columns,
                                 .dout = dout,
                                 .raw = raw,
                                 .raw_columns = columns,
                                 .dbias = dbias,
                                 .dnorm_weight = dweight},
                                transform);
        return values_of(out, draw, dbias, dweight);
      });
    }
  }
}

TEST(Alignment, IsInvisibleInEmbeddingsAndLosses) {
  for (const DType dtype : compute_dtypes) {
    const DType accumulator = accumulator_of(dtype);
    // More tokens than one look at the ids takes; few ids, so that most occur often.
    constexpr std::int64_t tokens = 5500, vocab_size = 40, hidden_size = 1160;
    expect_alignment_invisible([&](std::int64_t shift) {
      Shifted table(normal_tensor(dtype, {vocab_size, hidden_size}, 1), shift);
      Shifted dx(normal_tensor(dtype, {tokens, hidden_size}, 2), shift),
          out(dtype, {tokens, hidden_size}, shift);
      Shifted dtable(constant_tensor(accumulator, {vocab_size, hidden_size}, 0.0), shift);
      const OwnedTensor ids = integer_tensor({tokens}, vocab_size, 3);
      embedding_forward(no_workspace(), out, static_cast<ConstTensorView>(table), ids);
      embedding_backward(no_workspace(), dtable, dx, ids, by_id(ids));

      Shifted logits(normal_tensor(accumulator, {5, 20008}, 4, 3.0), shift),
          dlogits(dtype, {5, 20008}, shift);
      Shifted nll(DType::f64, {5}, shift);
      const OwnedTensor targets = integer_tensor({5}, 20008, 5);
      cross_entropy(no_workspace(),
                    {.dlogits = dlogits, .nll = nll, .logits = logits, .targets = targets, .scale = 0.5});
      return values_of(out, dtable, dlogits, nll);
    });
  }
}

}  // namespace
}  // namespace layerstream::ops
