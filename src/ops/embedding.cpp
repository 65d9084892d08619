#include "ops/embedding.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/rows_by_id.hpp"

namespace layerstream::ops {
namespace {

using detail::lane_width;
using detail::load_piece;
using detail::load_stored;
using detail::MathOf;
using detail::store_stored;
using detail::Values;
using detail::whole_pieces;

template <class T>
struct PlainTable {
  static constexpr int width = lane_width<T>;
  const T* values;

  bool is_aligned() const { return whole_pieces(width, {}, {values}); }
  template <class Piece>
  KOKKOS_INLINE_FUNCTION Values<T, Piece::width> load(const Piece& piece, std::int64_t row) const {
    return load_stored(piece, values + row);
  }
};

struct SplitTable {
  static constexpr int width = lane_width<bf16>;
  const bf16* hi;
  const std::int16_t* lo;

  bool is_aligned() const { return whole_pieces(width, {}, {hi, lo}); }
  template <class Piece>
  KOKKOS_INLINE_FUNCTION Values<float, Piece::width> load(const Piece& piece, std::int64_t row) const {
    const auto high = load_stored(piece, hi + row);
    const auto low = load_stored(piece, lo + row);
    Values<float, Piece::width> merged;
    for (int k = 0; k < Piece::width; ++k) merged.at[k] = merge(high.at[k], low.at[k]);
    return merged;
  }
};

template <class T, class Table>
struct GatherRow {
  T* out;                   // (T, H)
  Table table;              // (V, H)
  const std::int32_t* ids;  // (T)
  std::int64_t hidden_size;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t token) const {
    T* result = out + token * hidden_size;
    const std::int64_t first = ids[token] * hidden_size;
    const Table source = table;
    if constexpr (Group::is_team) {
      // Several pieces are under way before the first is stored.
      constexpr int at_once = 4;
      for (int begin = 0; group.template piece<Table::width>(begin, hidden_size).available > 0;
           begin += at_once) {
        decltype(source.load(group.template piece<Table::width>(0, 0), first)) values[at_once];
        LAYERSTREAM_UNROLL
        for (int k = 0; k < at_once; ++k) {
          const auto piece = group.template piece<Table::width>(begin + k, hidden_size);
          if (piece.available > 0) values[k] = source.load(piece, first);
        }
        LAYERSTREAM_UNROLL
        for (int k = 0; k < at_once; ++k) {
          const auto piece = group.template piece<Table::width>(begin + k, hidden_size);
          if (piece.available > 0) store_stored(piece, result, values[k]);
        }
      }
    } else {
      group.template for_each_piece<Table::width>(
          hidden_size, [=](auto piece) { store_stored(piece, result, source.load(piece, first)); });
    }
  }
};

template <class T, class Table>
void launch_gather(const Context& context, TensorView out, Table table, ConstTensorView ids) {
  detail::for_each_row(
      detail::execution_space(context), "layerstream::embedding_forward", out.dim(0),
      GatherRow<T, Table>{out.as<T>(), table, ids.as<std::int32_t>(), out.dim(1)},
      {.whole = table.is_aligned() && whole_pieces(Table::width, {out.dim(1)}, {out.data()})});
}

/// @throws ContractError unless out is (T, H), ids (T) int32 and table (V, H) of `table_dtype`.
void expect_gather(const char* operation, const ConstTensorView& out, const ConstTensorView& table,
                   DType table_dtype, const ConstTensorView& ids) {
  detail::expect_rank(operation, "out", out, 2);
  detail::expect_rank(operation, "table", table, 2);
  detail::expect_tensor(operation, "out", out, out.dtype(), out.shape());
  detail::expect_tensor(operation, "table", table, table_dtype, {table.dim(0), out.dim(1)});
  detail::expect_tensor(operation, "ids", ids, DType::i32, {out.dim(0)});
}

}  // namespace

void embedding_forward(const Context& context, TensorView out, SplitMatrix table, ConstTensorView ids) {
  constexpr const char* operation = "embedding_forward";
  expect_gather(operation, out, table.hi, DType::bf16, ids);
  if (out.dtype() == DType::bf16) {
    return launch_gather<bf16>(context, out, PlainTable<bf16>{table.hi.as<bf16>()}, ids);
  }
  LAYERSTREAM_EXPECT(out.dtype() == DType::f32, "{}: a split table gives bf16 or fp32, not {}", operation,
                     name_of(out.dtype()));
  detail::expect_tensor(operation, "table.lo", table.lo, DType::i16, table.hi.shape());
  launch_gather<float>(context, out, SplitTable{table.hi.as<bf16>(), table.lo.as<std::int16_t>()}, ids);
}

void embedding_forward(const Context& context, TensorView out, ConstTensorView table, ConstTensorView ids) {
  constexpr const char* operation = "embedding_forward";
  expect_gather(operation, out, table, out.dtype(), ids);
  detail::dispatch_compute(out.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    launch_gather<T>(context, out, PlainTable<T>{table.as<T>()}, ids);
  });
}

void embedding_backward(const Context& context, TensorView dtable, ConstTensorView dx, ConstTensorView ids) {
  constexpr const char* operation = "embedding_backward";
  expect_gather(operation, dx, dtable, accumulator_of(dx.dtype()), ids);
  detail::dispatch_compute(dx.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::add_rows_by_id(detail::execution_space(context), dtable.as<MathOf<T>>(), dx.as<T>(),
                           ids.as<std::int32_t>(), dx.dim(0), dx.dim(1));
  });
}

}  // namespace layerstream::ops
