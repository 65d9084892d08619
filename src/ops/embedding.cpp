#include "ops/embedding.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "ops/cuda/rows_by_id.hpp"
#else
#include "ops/detail/rows_by_id.hpp"
#endif

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

/// Bits of a row's mark.
constexpr std::uint8_t not_zero = 1, used = 2;

/// A row that is used is copied, one that was is cleared, and others are not touched.
struct EmitRow {
  static constexpr int width = 4;
  float* out;          // (V, H)
  const float* table;  // (V, H)
  const std::uint8_t* marks;
  std::int64_t hidden_size;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const std::uint8_t mark = marks[row];
    if (mark == 0) return;
    float* const result = out + row * hidden_size;
    const float* const source = table + row * hidden_size;
    const bool copies = (mark & used) != 0;
    group.template for_each_piece<width>(hidden_size, [=](auto piece) {
      auto values = load_stored(piece, source);
      if (!copies) values = {};
      store_stored(piece, result, values);
    });
  }
};

struct MarkUsed {
  std::uint8_t* marks;
  const std::int32_t* ids;
  /// Tokens of one row write the same.
  KOKKOS_FUNCTION void operator()(std::int64_t token) const {
    marks[ids[token]] = static_cast<std::uint8_t>(marks[ids[token]] | used);
  }
};

struct AgeMark {
  std::uint8_t* marks;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    marks[row] = static_cast<std::uint8_t>((marks[row] & used) != 0 ? not_zero : 0);
  }
};

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

void embedding_backward(const Context& context, TensorView dtable, ConstTensorView dx, ConstTensorView ids,
                        ConstTensorView by_id) {
  constexpr const char* operation = "embedding_backward";
  expect_gather(operation, dx, dtable, accumulator_of(dx.dtype()), ids);
  detail::expect_tensor(operation, "by_id", by_id, DType::i32, {ids.dim(0), 4});
  detail::dispatch_compute(dx.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const detail::RowsById<T> args{.table = dtable.as<MathOf<T>>(),
                                   .rows = dx.as<T>(),
                                   .ids = ids.as<std::int32_t>(),
                                   .by_id = by_id.as<std::int32_t>(),
                                   .num_rows = dx.dim(0),
                                   .columns = dx.dim(1)};
    detail::add_rows_by_id(detail::execution_space(context), args);
  });
}

std::vector<std::int32_t> tokens_by_id(std::span<const std::int32_t> ids) {
  std::vector<std::int32_t> tokens(ids.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto id_of = [&](std::int32_t token) { return ids[static_cast<std::size_t>(token)]; };
  std::ranges::stable_sort(tokens, {}, id_of);

  struct Run {
    std::int32_t id, first, count;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int32_t id = id_of(tokens[i]);
    if (runs.empty() || runs.back().id != id) runs.push_back({id, static_cast<std::int32_t>(i), 0});
    ++runs.back().count;
  }
  std::ranges::stable_sort(runs, std::ranges::greater{}, &Run::count);

  std::vector<std::int32_t> rows(4 * ids.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) rows[4 * i] = tokens[i];
  auto share = rows.begin();
  for (const Run& run : runs) {
    for (int i = run.count > detail::few_rows_of_id ? detail::shares_of_many : 1; i > 0; --i, share += 4) {
      share[1] = run.id;
      share[2] = run.first;
      share[3] = run.count;
    }
  }
  return rows;
}

void emit_rows(const Context& context, TensorView out, ConstTensorView table, TensorView written,
               ConstTensorView ids) {
  constexpr const char* operation = "emit_rows";
  detail::expect_rank(operation, "table", table, 2);
  detail::expect_rank(operation, "ids", ids, 1);
  const std::int64_t rows = table.dim(0), hidden_size = table.dim(1);
  detail::expect_tensor(operation, "table", table, DType::f32, table.shape());
  detail::expect_tensor(operation, "out", out, DType::f32, table.shape());
  detail::expect_tensor(operation, "written", written, DType::u8, {rows});
  detail::expect_tensor(operation, "ids", ids, DType::i32, ids.shape());
  auto* const marks = written.as<std::uint8_t>();
  const MarkUsed mark{marks, ids.as<std::int32_t>()};
  const EmitRow emit{out.as<float>(), table.as<float>(), marks, hidden_size};
  const AgeMark age{marks};
  if constexpr (detail::runs_on_host) {
    // On the calling thread, as adamw_device: it runs beside the compute lane.
    for (std::int64_t token = 0; token < ids.numel(); ++token) mark(token);
    for (std::int64_t row = 0; row < rows; ++row) emit(detail::SerialGroup{}, row);
    for (std::int64_t row = 0; row < rows; ++row) age(row);
  } else {
    using Policy = Kokkos::RangePolicy<detail::ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
    const auto& space = detail::execution_space(context);
    Kokkos::parallel_for("layerstream::mark_rows", Policy(space, 0, ids.numel()), mark);
    detail::for_each_row(space, "layerstream::emit_rows", rows, emit,
                         {.whole = whole_pieces(EmitRow::width, {hidden_size}, {out.data(), table.data()})});
    Kokkos::parallel_for("layerstream::age_marks", Policy(space, 0, rows), age);
  }
}

}  // namespace layerstream::ops
