#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>

#include "ops/elementwise.hpp"
#include "ops/embedding.hpp"
#include "ops/heads.hpp"
#include "ops/linear.hpp"
#include "ops/loss.hpp"
#include "ops/norm.hpp"
#include "tests/ops/ops_test.hpp"
#include "tests/support/rerun.hpp"

/// The number of threads is fixed when Kokkos starts, so this program runs itself again with other numbers
/// and compares a checksum of every operation's output bits.
namespace layerstream::ops {
namespace {

using namespace layerstream::test;

/// FNV-1a over the bytes of everything added.
class Checksum {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ begin[i]) * 0x100000001b3ULL;
  }
  void add(const OwnedTensor& tensor) { add(tensor.view().data(), tensor.bytes()); }
  std::string hex() const { return fmt::format("{:016x}", hash_); }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

constexpr std::int64_t tokens = 197, hidden_size = 201, heads = 3, head_dim = 34;

OwnedTensor zeros(DType dtype, Shape shape) {
  return constant_tensor(dtype, shape, 0.0);
}

std::string linear_checksum(DType dtype) {
  // Several BLAS tiles each way, and inner extents around the depth at which BLAS libraries split sums.
  Checksum sum;
  Scratch scratch(linear_workspace(dtype));
  for (const auto& [t, n, k] : {std::array<std::int64_t, 3>{515, 270, 389}, {3, 601, 700}, {700, 5, 515}}) {
    const OwnedTensor x = normal_tensor(dtype, {t, k}, 1), w = normal_tensor(dtype, {n, k}, 2);
    const OwnedTensor dy = normal_tensor(dtype, {t, n}, 3);
    OwnedTensor y(dtype, {t, n}), dx(dtype, {t, k}), dw = zeros(accumulator_of(dtype), {n, k});
    linear_forward(scratch, y, x, w);
    linear_backward_input(scratch, dx, dy, w);
    linear_backward_weight(scratch, dw, dy, x);
    for (const OwnedTensor* result : {&y, &dx, &dw}) sum.add(*result);
  }
  const OwnedTensor dy = normal_tensor(dtype, {tokens, hidden_size}, 4);
  OwnedTensor dbias = zeros(accumulator_of(dtype), {hidden_size});
  bias_backward(scratch, dbias, dy);
  sum.add(dbias);
  return sum.hex();
}

std::string norm_checksum(DType dtype) {
  const DType accumulator = accumulator_of(dtype);
  const OwnedTensor x = normal_tensor(dtype, {tokens, hidden_size}, 5),
                    dy = normal_tensor(dtype, x.shape(), 6);
  const OwnedTensor weight = normal_tensor(accumulator, {hidden_size}, 7);
  OwnedTensor y(dtype, x.shape()), dx(dtype, x.shape()), dweight = zeros(accumulator, {hidden_size});
  Scratch scratch(rms_norm_backward_workspace(tokens, hidden_size, dtype));
  rms_norm_forward(scratch, y, x, weight, 1e-6);
  rms_norm_backward(
      scratch,
      {.dx = dx, .dweight = dweight, .dy = dy, .x = x, .weight = weight, .residual = dy, .eps = 1e-6});
  Checksum sum;
  for (const OwnedTensor* result : {&y, &dx, &dweight}) sum.add(*result);
  return sum.hex();
}

std::string heads_checksum(DType dtype) {
  const DType accumulator = accumulator_of(dtype);
  const std::int64_t width = heads * head_dim;
  const OwnedTensor raw = normal_tensor(dtype, {tokens, width}, 8),
                    bias = normal_tensor(accumulator, {width}, 9);
  const OwnedTensor weight = normal_tensor(accumulator, {head_dim}, 10);
  const OwnedTensor cos = normal_tensor(accumulator, {50, head_dim / 2}, 11),
                    sin = normal_tensor(accumulator, cos.shape(), 12);
  const OwnedTensor positions = integer_tensor({tokens}, 50, 13),
                    dout = normal_tensor(dtype, {tokens, heads, head_dim}, 14);
  const HeadTransform transform{
      .bias = bias, .norm_weight = weight, .norm_eps = 1e-6, .cos = cos, .sin = sin, .positions = positions};
  OwnedTensor out(dtype, dout.shape()), draw(dtype, raw.shape());
  OwnedTensor dbias = zeros(accumulator, {width}), dweight = zeros(accumulator, {head_dim});
  Scratch scratch(head_transform_backward_workspace(tokens, heads, head_dim, dtype));
  head_transform_forward(scratch, out, raw, {width, 0}, transform);
  head_transform_backward(scratch,
                          {.draw = draw,
                           .draw_columns = {width, 0},
                           .dout = dout,
                           .raw = raw,
                           .raw_columns = {width, 0},
                           .dbias = dbias,
                           .dnorm_weight = dweight},
                          transform);
  Checksum sum;
  for (const OwnedTensor* result : {&out, &draw, &dbias, &dweight}) sum.add(*result);
  return sum.hex();
}

std::string rest_checksum(DType dtype) {
  const DType accumulator = accumulator_of(dtype);
  const OwnedTensor gate_up = normal_tensor(dtype, {tokens, 2 * hidden_size}, 15);
  const OwnedTensor dact = normal_tensor(dtype, {tokens, hidden_size}, 16);
  OwnedTensor act(dtype, dact.shape()), dgate_up(dtype, gate_up.shape()), total(dtype, dact.shape());
  swiglu_forward(no_workspace(), act, gate_up);
  swiglu_backward(no_workspace(), dgate_up, dact, gate_up);
  add(no_workspace(), total, act, dact);

  const OwnedTensor ids = integer_tensor({tokens}, 23, 17),
                    logits = normal_tensor(accumulator, {tokens, 23}, 18);
  OwnedTensor dtable = zeros(accumulator, {23, hidden_size}), dlogits(dtype, logits.shape()),
              nll(DType::f64, {tokens});
  embedding_backward(no_workspace(), dtable, dact, ids, by_id(ids));
  cross_entropy(no_workspace(),
                {.dlogits = dlogits, .nll = nll, .logits = logits, .targets = ids, .scale = 0.01});

  const OwnedTensor many = normal_tensor(DType::f32, {100003}, 19);
  double squares = 0.0;
  Scratch scratch(sum_of_squares_workspace(many.numel()));
  sum_of_squares(scratch, &squares, many);
  Checksum sum;
  for (const OwnedTensor* result : {&act, &dgate_up, &total, &dtable, &dlogits, &nll}) sum.add(*result);
  sum.add(&squares, sizeof squares);
  return sum.hex();
}

std::string all_checksums() {
  std::string line;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    line += fmt::format("{}: linear {} norm {} heads {} rest {}; ", name_of(dtype), linear_checksum(dtype),
                        norm_checksum(dtype), heads_checksum(dtype), rest_checksum(dtype));
  }
  return line;
}

constexpr const char* marker = "checksums = ";

// Run only by the test below, as another process.
TEST(ThreadCount, DISABLED_PrintsChecksums) {
  std::printf("%s%s\n", marker, all_checksums().c_str());
}

/// What this program prints when it runs with `threads` threads.
std::string checksums_with(int threads) {
  return line_of_rerun(fmt::format("OMP_NUM_THREADS={} OMP_PROC_BIND=false", threads),
                       "ThreadCount.DISABLED_PrintsChecksums", marker);
}

TEST(ThreadCount, DoesNotChangeAnyResultBit) {
  const std::string here = marker + all_checksums();
  for (const int threads : {1, 2, 3}) EXPECT_EQ(checksums_with(threads), here) << threads << " threads";
}

}  // namespace
}  // namespace layerstream::ops
