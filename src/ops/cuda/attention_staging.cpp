#include "ops/cuda/attention_staging.hpp"

#include <limits>

#include "core/error.hpp"
#include "ops/detail/execution.hpp"
#include "ops/detail/vector.hpp"

namespace layerstream::ops::cuda {
namespace {

using detail::AttentionCall;
using detail::AttentionShape;
using detail::ExecutionSpace;
using detail::Values;

/// Of bf16 in one access, and of FP32, so that neighbours access neighbours.
constexpr int piece_width = detail::lane_width<bf16>, wide_width = detail::lane_width<float>;
using Piece = detail::Piece<piece_width, true>;
using WidePiece = detail::Piece<wide_width, true>;
using WideValues = Values<float, wide_width>;

/// Work item i writes entry i.
struct WriteTable {
  struct Entry {
    std::int32_t row, queries, keys;
  };
  Entry entries[detail::attention_call_entries];
  std::int32_t count, batch;
  std::int64_t first_query;
  std::int64_t heads, query_row, key_row;  // elements of a row of lse, queries, keys
  AttentionTable table;

  KOKKOS_FUNCTION void operator()(int i) const {
    const bool real = i < count;
    const Entry& entry = entries[real ? i : count - 1];
    const std::int64_t query = entry.row + (real ? 0 : entry.queries);
    const std::int64_t key = entry.row + (real ? 0 : entry.keys);
    table.query_offsets[i] = query * query_row;
    table.key_offsets[i] = key * key_row;
    table.lse_offsets[i] = (first_query + query) * heads;
    if (i == batch) return;
    table.query_lengths[i] = real ? entry.queries : 0;
    table.key_lengths[i] = real ? entry.keys : 0;
  }
};
// Beyond this Kokkos would pass the functor through one buffer of constant memory, waiting for its last user.
static_assert(sizeof(WriteTable) < 4000);

/// Work item i moves a run of heads of one query: neighbours write neighbours, and each reads one sector.
struct TransposeLse {
  static constexpr unsigned run = 4;
  float* out;
  const float* lse;
  unsigned rows, queries, heads;

  KOKKOS_FUNCTION void operator()(unsigned i) const {
    const unsigned row = i % rows, first = i / rows * run;
    const unsigned query = row % queries, entry = row / queries;
    const float* source = lse + static_cast<std::int64_t>(row) * heads + first;
    float* target = out + (static_cast<std::int64_t>(entry) * heads + first) * queries + query;
    float values[run];  // all under way before the first store
    LAYERSTREAM_UNROLL
    for (unsigned k = 0; k < run; ++k) values[k] = first + k < heads ? source[k] : 0.0F;
    LAYERSTREAM_UNROLL
    for (unsigned k = 0; k < run; ++k) {
      if (first + k < heads) target[static_cast<std::int64_t>(k) * queries] = values[k];
    }
  }
};

/// Work item i joins one piece of o.
struct JoinOutputs {
  OutputParts parts;
  std::int64_t pieces;  // of a head

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const Piece piece{i * piece_width};
    const float a = parts.lse[i / pieces], b = parts.more_lse[i / pieces];
    const float largest = Kokkos::fmax(a, b);
    const float weight = Kokkos::exp(a - largest), more_weight = Kokkos::exp(b - largest);
    const float total = weight + more_weight;
    Values<float, piece_width> o = detail::load_piece(piece, static_cast<const bf16*>(parts.o));
    const Values<float, piece_width> more = detail::load_piece(piece, parts.more);
    for (int k = 0; k < piece_width; ++k) {
      o.at[k] = Kokkos::fma(weight, o.at[k], more_weight * more.at[k]) / total;
    }
    detail::store_piece(piece, parts.o, o);
  }
};

/// Work item i joins one number of lse, when o has been joined.
struct JoinLse {
  float* lse;
  const float* more;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const float a = lse[i], b = more[i], largest = Kokkos::fmax(a, b);
    lse[i] = largest + Kokkos::log(Kokkos::exp(a - largest) + Kokkos::exp(b - largest));
  }
};

/// Work item i writes one piece of dk and of dv.
struct WriteKeyGradients {
  KeyGradients gradients;
  const std::int64_t* offsets;  // null: entries lie one after the other
  const std::int32_t* lengths;
  std::int64_t entry_pieces, row_pieces;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    std::int64_t element = i * wide_width;
    if (offsets != nullptr) {
      const std::int64_t entry = i / entry_pieces, piece = i % entry_pieces;
      if (piece >= lengths[entry] * row_pieces) return;
      element = offsets[entry] + piece * wide_width;
    }
    const WidePiece piece{element};
    const auto dk_part = detail::load_stored(piece, gradients.dk_part);
    const auto dv_part = detail::load_stored(piece, gradients.dv_part);
    const WideValues dk = total(piece, gradients.dk, dk_part);
    const WideValues dv = total(piece, gradients.dv, dv_part);
    detail::store_piece(piece, gradients.dk, dk);
    detail::store_piece(piece, gradients.dv, dv);
  }

  KOKKOS_INLINE_FUNCTION WideValues total(const WidePiece& piece, const float* sum,
                                          const Values<bf16, wide_width>& part) const {
    WideValues result{};
    const WideValues more = detail::widened(part);
    if (!gradients.store) result = detail::load_piece(piece, sum);
    // To zeros as well: 0 + -0 is +0.
    for (int k = 0; k < wide_width; ++k) result.at[k] += more.at[k];
    return result;
  }
};

struct SumQueryGradients {
  QueryGradients gradients;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const WidePiece piece{i * wide_width};
    WideValues total = detail::load_piece(piece, gradients.part);
    const WideValues before = gradients.second
                                  ? detail::load_piece(piece, static_cast<const bf16*>(gradients.dq))
                                  : detail::load_piece(piece, static_cast<const float*>(gradients.sum));
    for (int k = 0; k < wide_width; ++k) total.at[k] += before.at[k];
    if (gradients.last) {
      detail::store_piece(piece, gradients.dq, total);
    } else {
      detail::store_piece(piece, gradients.sum, total);
    }
  }
};

template <class Body>
void for_each_index(const ExecutionSpace& space, const char* label, std::int64_t count, const Body& body) {
  if (count == 0) return;
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_for(label, Policy(space, 0, count), body);
}

}  // namespace

AttentionTable::AttentionTable(void* memory, std::int64_t batch)
    : query_offsets(static_cast<std::int64_t*>(memory)),
      key_offsets(query_offsets + batch + 1),
      lse_offsets(key_offsets + batch + 1),
      query_lengths(reinterpret_cast<std::int32_t*>(lse_offsets + batch + 1)),
      key_lengths(query_lengths + batch) {}

void write_table(const Context& context, const AttentionTable& table, const AttentionCall& call,
                 const AttentionShape& shape) {
  WriteTable writer{.entries = {},
                    .count = static_cast<std::int32_t>(call.entries.size()),
                    .batch = static_cast<std::int32_t>(call.batch),
                    .first_query = call.first_query(),
                    .heads = shape.heads,
                    .query_row = shape.query_stride(),
                    .key_row = shape.key_stride(),
                    .table = table};
  LAYERSTREAM_EXPECT(writer.count <= detail::attention_call_entries, "{} entries", writer.count);
  for (int i = 0; i < writer.count; ++i) {
    const AttentionSegment& entry = call.entries[static_cast<std::size_t>(i)];
    writer.entries[i] = {static_cast<std::int32_t>(entry.first_query - call.first_query()),
                         static_cast<std::int32_t>(entry.num_queries),
                         static_cast<std::int32_t>(entry.num_keys)};
  }
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<int>>;
  Kokkos::parallel_for("layerstream::attention_table",
                       Kokkos::Experimental::require(
                           Policy(detail::execution_space(context), 0, static_cast<int>(call.batch) + 1),
                           Kokkos::Experimental::WorkItemProperty::HintLightWeight),
                       writer);
}

void transpose_lse(const Context& context, float* out, const float* lse, std::int64_t batch,
                   std::int64_t queries, std::int64_t heads) {
  const std::int64_t rows = batch * queries, items = rows * detail::tiles(heads, TransposeLse::run);
  LAYERSTREAM_EXPECT(items <= std::numeric_limits<int>::max(), "{} queries of {} heads in one call", rows,
                     heads);
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<unsigned>>;
  Kokkos::parallel_for("layerstream::attention_transpose_lse",
                       Policy(detail::execution_space(context), 0, static_cast<unsigned>(items)),
                       TransposeLse{out, lse, static_cast<unsigned>(rows), static_cast<unsigned>(queries),
                                    static_cast<unsigned>(heads)});
}

void join_outputs(const Context& context, const OutputParts& parts, std::int64_t rows,
                  const AttentionShape& shape) {
  const ExecutionSpace space = detail::execution_space(context);
  const std::int64_t pieces = shape.head_dim / piece_width, heads = rows * shape.heads;
  for_each_index(space, "layerstream::attention_join_o", heads * pieces, JoinOutputs{parts, pieces});
  for_each_index(space, "layerstream::attention_join_lse", heads, JoinLse{parts.lse, parts.more_lse});
}

void write_key_gradients(const Context& context, const KeyGradients& gradients, const AttentionTable& table,
                         const AttentionCall& call, const AttentionShape& shape) {
  const std::int64_t row_pieces = shape.key_stride() / wide_width, entry_pieces = call.keys * row_pieces;
  const auto entries = static_cast<std::int64_t>(call.entries.size());
  for_each_index(detail::execution_space(context), "layerstream::attention_write_dk_dv",
                 entries * entry_pieces,
                 WriteKeyGradients{gradients, call.ragged ? table.key_offsets : nullptr,
                                   call.ragged ? table.key_lengths : nullptr, entry_pieces, row_pieces});
}

void sum_query_gradients(const Context& context, const QueryGradients& gradients, std::int64_t elements) {
  for_each_index(detail::execution_space(context), "layerstream::attention_sum_dq", elements / wide_width,
                 SumQueryGradients{gradients});
}

}  // namespace layerstream::ops::cuda
