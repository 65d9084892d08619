#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// A weight matrix as it streams: bf16 upper halves, and the lower halves when FP32 is wanted.
struct SplitMatrix {
  ConstTensorView hi;  ///< (V, H) bf16
  ConstTensorView lo;  ///< (V, H) int16, or empty
};

/// out[t, :] = table[ids[t], :]. @param out (T, H): bf16 takes hi, fp32 merges hi and lo.
/// @param ids (T) int32 in [0, V).
void embedding_forward(const Context& context, TensorView out, SplitMatrix table, ConstTensorView ids);

/// The same from a plain table of out's dtype.
void embedding_forward(const Context& context, TensorView out, ConstTensorView table, ConstTensorView ids);

/// dtable[ids[t], :] += dx[t, :], tokens in order. @param dtable (V, H) accumulator dtype, @param dx
/// (T, H) compute dtype, @param by_id (T, 4) int32: tokens_by_id of the ids, where ids are.
void embedding_backward(const Context& context, TensorView dtable, ConstTensorView dx, ConstTensorView ids,
                        ConstTensorView by_id);
/// On the host: what a device goes by in embedding_backward, (T, 4). Column 0 has the tokens in order of
/// their ids, those of one id in order. Columns 1 to 3 have shares of the work, and zeros after the last: an
/// id, where its tokens begin in column 0, and how many they are. Ids of most tokens come first; those of
/// many have several equal shares, which divide the columns of dtable.
/// @param ids fewer than 2^31, none negative
std::vector<std::int32_t> tokens_by_id(std::span<const std::int32_t> ids);

/// Makes `out` equal to `table`, whose rows are zero but for those that `ids` name: writes those, and zeros
/// to rows that an earlier call wrote. For an `out` in host memory that the device reaches: only used rows
/// cross the link.
/// @param out, table (V, H) fp32. @param written (V) uint8 on the device: 0 where a row of out is known to be
/// zero; updated.
/// @param ids (T) int32 in [0, V).
void emit_rows(const Context& context, TensorView out, ConstTensorView table, TensorView written,
               ConstTensorView ids);

}  // namespace layerstream::ops
