#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "tests/ops/attention_reference.hpp"
#include "tests/ops/ops_test.hpp"
#include "tests/support/rerun.hpp"

/// What must not change the result of attention: the cut of a row into chunks, other segments of the call,
/// the number of threads.
namespace layerstream::test {
namespace {

using ops::AttentionSegment;

/// The rows of queries and keys that one call sees, and whose rows of the outputs it writes.
struct Rows {
  std::int64_t first_query, num_queries, first_key, num_keys;
};

void forward(const AttentionCase& c, AttentionTensors& t, const Rows& rows,
             std::span<const AttentionSegment> segments) {
  Scratch scratch(ops::attention_workspace(c.limits(t.q.dtype())));
  const auto queries = [&](const OwnedTensor& tensor) {
    return tensor.view().rows(rows.first_query, rows.num_queries);
  };
  const auto written = [&](OwnedTensor& tensor) {
    return tensor.view().rows(rows.first_query, rows.num_queries);
  };
  const auto keys = [&](const OwnedTensor& tensor) {
    return tensor.view().rows(rows.first_key, rows.num_keys);
  };
  ops::attention_forward(scratch, {written(t.o), written(t.lse), queries(t.q), keys(t.k), keys(t.v)},
                         segments, c.settings());
}

void backward(const AttentionCase& c, AttentionTensors& t, const Rows& rows,
              std::span<const AttentionSegment> segments, bool accumulate = true) {
  Scratch scratch(ops::attention_workspace(c.limits(t.q.dtype())));
  const auto queries = [&](const OwnedTensor& tensor) {
    return tensor.view().rows(rows.first_query, rows.num_queries);
  };
  const auto keys = [&](const OwnedTensor& tensor) {
    return tensor.view().rows(rows.first_key, rows.num_keys);
  };
  ops::attention_backward(scratch,
                          {.dq = t.dq.view().rows(rows.first_query, rows.num_queries),
                           .dk = t.dk.view().rows(rows.first_key, rows.num_keys),
                           .dv = t.dv.view().rows(rows.first_key, rows.num_keys),
                           .dout = queries(t.dout),
                           .q = queries(t.q),
                           .k = keys(t.k),
                           .v = keys(t.v),
                           .o = queries(t.o),
                           .lse = queries(t.lse),
                           .accumulate = accumulate},
                          segments, c.settings());
}

void both(const AttentionCase& c, AttentionTensors& t) {
  const Rows all{0, c.num_queries, 0, c.num_keys};
  forward(c, t, all, c.segments);
  backward(c, t, all, c.segments);
}

class ChunkedAttention : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(ChunkedAttention, IsThatOfTheWholeRow) {
  constexpr std::int64_t length = 700;
  const AttentionCase whole{"", 4, 2, 16, length, length, under_window(GetParam(), {{0, length, 0, length}})};
  AttentionTensors once(whole, DType::f64), chunked(whole, DType::f64);
  both(whole, once);

  const std::vector<std::int64_t> edges = {0, 256, 257, 557, length};
  const auto chunk = [&](std::size_t i) { return Rows{edges[i], edges[i + 1] - edges[i], 0, edges[i + 1]}; };
  const auto segment = [](const Rows& rows) {
    return under_window(GetParam(), {{0, rows.num_queries, 0, rows.num_keys}});
  };
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) forward(whole, chunked, chunk(i), segment(chunk(i)));
  chunked.dk = constant_tensor(DType::f64, whole.key_shape(), std::numeric_limits<double>::quiet_NaN());
  chunked.dv = OwnedTensor(chunked.dk);
  for (std::size_t i = edges.size() - 1; i-- > 0;) {
    backward(whole, chunked, chunk(i), segment(chunk(i)), chunk(i).num_keys < length);
  }

  // Another order of sums of at most 1,400 numbers, each sum of order one to ten.
  for (const auto tensor : {&AttentionTensors::o, &AttentionTensors::lse, &AttentionTensors::dq,
                            &AttentionTensors::dk, &AttentionTensors::dv}) {
    expect_within(chunked.*tensor, once.*tensor, [](std::int64_t) { return 1e-12; });
  }
}
INSTANTIATE_TEST_SUITE_P(Windows, ChunkedAttention, ::testing::Values(0, 90, 300));

bool same_rows(const OwnedTensor& a, const OwnedTensor& b, std::int64_t first, std::int64_t count) {
  const ConstTensorView x = a.view().rows(first, count), y = b.view().rows(first, count);
  return std::memcmp(x.data(), y.data(), x.bytes()) == 0;
}

class PackedAttention : public ::testing::TestWithParam<DType> {};

TEST_P(PackedAttention, EditingOneDocumentLeavesTheOthersBitwiseEqual) {
  const AttentionCase c{"", 4, 2, 20, 500, 500, {{0, 150, 0, 150}, {150, 70, 150, 70}, {220, 280, 220, 280}}};
  AttentionTensors before(c, GetParam()), edited(c, GetParam());
  for (OwnedTensor* tensor : {&edited.q, &edited.k, &edited.v, &edited.dout}) {
    const std::int64_t row = tensor->numel() / c.num_queries;
    for (std::int64_t i = 150 * row; i < 220 * row; ++i) tensor->set(i, 100.0 * (*tensor)[i] + 1.0);
  }
  both(c, before);
  both(c, edited);
  for (const auto tensor : {&AttentionTensors::o, &AttentionTensors::lse, &AttentionTensors::dq,
                            &AttentionTensors::dk, &AttentionTensors::dv}) {
    EXPECT_TRUE(same_rows(before.*tensor, edited.*tensor, 0, 150));
    EXPECT_FALSE(same_rows(before.*tensor, edited.*tensor, 150, 70));
    EXPECT_TRUE(same_rows(before.*tensor, edited.*tensor, 220, 280));
  }
}

TEST_P(PackedAttention, ADocumentInAPackIsBitwiseTheDocumentAlone) {
  const AttentionCase c{"", 4, 2, 20, 500, 500, {{0, 150, 0, 150}, {150, 70, 150, 70}, {220, 280, 220, 280}}};
  AttentionTensors packed(c, GetParam()), alone(c, GetParam());
  both(c, packed);
  for (const AttentionSegment& document : c.segments) {
    const Rows rows{document.first_query, document.num_queries, document.first_key, document.num_keys};
    const std::array segment{AttentionSegment{0, document.num_queries, 0, document.num_keys}};
    forward(c, alone, rows, segment);
    backward(c, alone, rows, segment);
  }
  for (const auto tensor : {&AttentionTensors::o, &AttentionTensors::lse, &AttentionTensors::dq,
                            &AttentionTensors::dk, &AttentionTensors::dv}) {
    EXPECT_TRUE((packed.*tensor).same_bits(alone.*tensor));
  }
}
INSTANTIATE_TEST_SUITE_P(DTypes, PackedAttention, ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(SharedKeys, AreAddedToInTheOrderOfSegments) {
  constexpr std::int64_t count = 48, queries = 16, keys = 200;
  AttentionCase c{"", 2, 1, 8, count * queries, keys, {}};
  for (std::int64_t i = 0; i < count; ++i) c.segments.push_back({i * queries, queries, 0, keys - i % 3});
  AttentionTensors together(c, DType::f32), in_turn(c, DType::f32);
  both(c, together);
  for (const AttentionSegment& segment : c.segments) {
    const Rows rows{segment.first_query, queries, 0, keys};
    const std::array alone{AttentionSegment{0, queries, 0, segment.num_keys}};
    forward(c, in_turn, rows, alone);
    backward(c, in_turn, rows, alone);
  }
  EXPECT_TRUE(together.dk.same_bits(in_turn.dk));
  EXPECT_TRUE(together.dv.same_bits(in_turn.dv));
}

TEST(AttentionWorkspace, IsEnoughForEveryLength) {
  // Scratch is exactly as large as asked for, so the address sanitizer sees a write past it.
  for (const std::int64_t length : {1, 64, 1000}) {
    const AttentionCase c{"", 2, 1, 8, length, length, {{0, length, 0, length}}};
    AttentionTensors t(c, DType::bf16);
    both(c, t);
    for (std::int64_t i = 0; i < t.o.numel(); ++i) ASSERT_TRUE(std::isfinite(t.o[i]));
  }
}

/// Memory of which only the touched pages exist.
class SparseTensor {
 public:
  SparseTensor(DType dtype, Shape shape)
      : bytes_(static_cast<std::size_t>(shape.numel()) * size_of(dtype)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0)),
        view_(memory_, dtype, shape) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~SparseTensor() { munmap(memory_, bytes_); }
  SparseTensor(const SparseTensor&) = delete;
  SparseTensor& operator=(const SparseTensor&) = delete;
  TensorView view() const { return view_; }

 private:
  std::size_t bytes_;
  void* memory_;
  TensorView view_;
};

TEST(Attention, ReachesKeysBeyondTheRangeOf32BitIndices) {
  if (ops::attention_rounds_products(64, DType::bf16)) {
    GTEST_SKIP() << "the device does not see memory that the host has only reserved";
  }
  const AttentionCase c{"", 2, 1, 64, 5, 30, {{0, 5, 0, 30}}};
  AttentionTensors near(c, DType::bf16);
  both(c, near);

  const std::int64_t first = (std::int64_t{1} << 32) / 64 - 10;  // the keys lie across element 2^32
  const Shape shape{first + c.num_keys, 1, 64};
  const SparseTensor k(DType::bf16, shape), v(DType::bf16, shape), dk(DType::f32, shape),
      dv(DType::f32, shape);
  const auto last = [&](const SparseTensor& tensor) { return tensor.view().rows(first, c.num_keys); };
  std::memcpy(last(k).data(), near.k.view().data(), near.k.bytes());
  std::memcpy(last(v).data(), near.v.view().data(), near.v.bytes());
  AttentionTensors far(c, DType::bf16);
  const std::array segments{AttentionSegment{0, 5, first, 30}};
  Scratch scratch(ops::attention_workspace({2, 1, 64, DType::bf16, c.num_queries, first + c.num_keys}));
  ops::attention_forward(scratch, {far.o, far.lse, far.q, k.view(), v.view()}, segments, c.settings());
  ops::attention_backward(scratch,
                          {.dq = far.dq,
                           .dk = dk.view(),
                           .dv = dv.view(),
                           .dout = far.dout,
                           .q = far.q,
                           .k = k.view(),
                           .v = v.view(),
                           .o = far.o,
                           .lse = far.lse},
                          segments, c.settings());
  EXPECT_TRUE(far.o.same_bits(near.o));
  EXPECT_TRUE(far.dq.same_bits(near.dq));
  EXPECT_EQ(std::memcmp(last(dk).data(), near.dk.view().data(), near.dk.bytes()), 0);
  EXPECT_EQ(std::memcmp(last(dv).data(), near.dv.view().data(), near.dv.bytes()), 0);
}

constexpr const char* marker = "attention bits = ";

/// FNV-1a over the output bits of a call that has more work than threads, for every dtype.
std::string output_bits() {
  const AttentionCase c{"",
                        4,
                        2,
                        20,
                        480,
                        700,
                        under_window(280, {{0, 300, 0, 300}, {300, 100, 250, 150}, {400, 80, 400, 300}})};
  std::string line = marker;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    AttentionTensors t(c, dtype);
    both(c, t);
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (const OwnedTensor* tensor : {&t.o, &t.lse, &t.dq, &t.dk, &t.dv}) {
      const auto* bytes = static_cast<const unsigned char*>(tensor->view().data());
      for (std::size_t i = 0; i < tensor->bytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
    }
    line += fmt::format("{:016x} ", hash);
  }
  return line;
}

TEST(AttentionThreads, PrintBits) {
  std::printf("%s\n", output_bits().c_str());
}

/// What this program prints with so many threads: both numbers are fixed when Kokkos starts.
std::string bits_with(int openmp_threads, int kokkos_threads) {
  return line_of_rerun(fmt::format("OMP_NUM_THREADS={} KOKKOS_NUM_THREADS={} OMP_PROC_BIND=false",
                                   openmp_threads, kokkos_threads),
                       "AttentionThreads.PrintBits", marker);
}

TEST(AttentionThreads, DoNotChangeAnyResultBit) {
  const std::string here = output_bits();
  for (const int threads : {1, 2, 3, 7})
    EXPECT_EQ(bits_with(threads, threads), here) << threads << " threads";
  // One Kokkos thread but more for OpenMP: here the BLAS may start threads of its own.
  EXPECT_EQ(bits_with(4, 1), here);
}

}  // namespace
}  // namespace layerstream::test
