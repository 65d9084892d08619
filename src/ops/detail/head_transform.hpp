#pragma once

#include <span>

#include "ops/detail/head_parts.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/partials.hpp"

/// The head transform on the host's threads.
namespace layerstream::ops::detail {

/// raw[i] + bias[i] of one head.
template <class T>
struct BiasedHead {
  using A = MathOf<T>;
  const T* raw;   // (d)
  const A* bias;  // (d) or nullptr
  KOKKOS_INLINE_FUNCTION A operator()(std::int64_t i) const {
    const A value = load(raw[i]);
    return bias == nullptr ? value : value + bias[i];
  }
};

template <class T, class Group>
KOKKOS_INLINE_FUNCTION MathOf<T> inverse_rms(const Group& group, const BiasedHead<T>& head,
                                             std::int64_t head_dim, MathOf<T> eps) {
  using A = MathOf<T>;
  const A squares = group.template sum<A>(head_dim, [=](std::int64_t i) { return head(i) * head(i); });
  return A(1) / Kokkos::sqrt(squares / static_cast<A>(head_dim) + eps);
}

/// One row is one head of one token.
template <class T>
struct HeadForwardRow : HeadForward<T> {
  using A = MathOf<T>;
  using Base = HeadForward<T>;
  using Base::head_dim, Base::heads, Base::out, Base::parts, Base::raw, Base::row_stride;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const std::int64_t token = row / heads, head = row % heads;
    const BiasedHead<T> value{raw + token * row_stride + head * head_dim,
                              parts.bias == nullptr ? nullptr : parts.bias + head * head_dim};
    T* result = out + row * head_dim;
    if (parts.norm_weight == nullptr) {
      rotate(group, token, result, value);
    } else {
      const A inverse = inverse_rms(group, value, head_dim, parts.eps);
      const A* weight = parts.norm_weight;
      rotate(group, token, result, [=](std::int64_t i) { return weight[i] * (value(i) * inverse); });
    }
  }

  template <class Group, class Value>
  KOKKOS_INLINE_FUNCTION void rotate(const Group& group, std::int64_t token, T* result,
                                     const Value& value) const {
    if (parts.positions == nullptr) {
      group.for_each(head_dim, [=](std::int64_t i) { result[i] = store_as<T>(value(i)); });
      return;
    }
    const std::int64_t half = head_dim / 2;
    const A* cos = parts.cos + parts.positions[token] * half;
    const A* sin = parts.sin + parts.positions[token] * half;
    group.for_each(half, [=](std::int64_t i) {
      const A first = value(i), second = value(i + half);
      result[i] = store_as<T>(first * cos[i] - second * sin[i]);
      result[i + half] = store_as<T>(second * cos[i] + first * sin[i]);
    });
  }
};

/// One row is one head over a block of tokens.
template <class T, class D>
struct HeadBackwardBlock : HeadBackward<T> {
  using A = MathOf<T>;
  using Base = HeadBackward<T>;
  using Base::parts, Base::raw, Base::dout, Base::draw, Base::draw_stride, Base::raw_stride;
  using Base::tokens, Base::heads, Base::head_dim;
  std::int64_t tokens_per_block;
  A* bias_partials;  // (blocks, H, d); nullptr without a bias
  A* norm_partials;  // the same; nullptr without a norm

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const std::int64_t block = row / heads, head = row % heads;
    A* dbias = bias_partials == nullptr ? nullptr : bias_partials + row * head_dim;
    A* dweight = norm_partials == nullptr ? nullptr : norm_partials + row * head_dim;
    if (dbias != nullptr) group.for_each(head_dim, [=](std::int64_t i) { dbias[i] = A(0); });
    if (dweight != nullptr) group.for_each(head_dim, [=](std::int64_t i) { dweight[i] = A(0); });
    const std::int64_t begin = block * tokens_per_block;
    const std::int64_t end = begin + tokens_per_block < tokens ? begin + tokens_per_block : tokens;
    for (std::int64_t token = begin; token < end; ++token) {
      backward_token(group, token, head, dbias, dweight);
    }
  }

  template <class Group>
  KOKKOS_INLINE_FUNCTION void backward_token(const Group& group, std::int64_t token, std::int64_t head,
                                             A* dbias, A* dweight) const {
    const D* grad = static_cast<const D*>(dout) + (token * heads + head) * head_dim;
    T* result = draw + token * draw_stride + head * head_dim;
    if (parts.positions == nullptr) {
      backward_norm(group, token, head, result, dbias, dweight,
                    [=](std::int64_t i) { return static_cast<A>(load(grad[i])); });
      return;
    }
    // The transpose of a rotation is the rotation by the opposite angle.
    const std::int64_t half = head_dim / 2;
    const A* cos = parts.cos + parts.positions[token] * half;
    const A* sin = parts.sin + parts.positions[token] * half;
    backward_norm(group, token, head, result, dbias, dweight, [=](std::int64_t i) {
      const bool lower = i < half;
      const std::int64_t angle = lower ? i : i - half;
      const A own = load(grad[i]), other = load(grad[lower ? i + half : i - half]);
      return lower ? own * cos[angle] + other * sin[angle] : own * cos[angle] - other * sin[angle];
    });
  }

  /// `grad(i)` is the gradient with respect to what entered the rope.
  template <class Group, class Gradient>
  KOKKOS_INLINE_FUNCTION void backward_norm(const Group& group, std::int64_t token, std::int64_t head,
                                            T* result, A* dbias, A* dweight, const Gradient& grad) const {
    if (parts.norm_weight == nullptr) {
      group.for_each(head_dim, [=](std::int64_t i) { write(result, dbias, i, grad(i)); });
      return;
    }
    const BiasedHead<T> value{raw + token * raw_stride + head * head_dim,
                              parts.bias == nullptr ? nullptr : parts.bias + head * head_dim};
    const A* weight = parts.norm_weight;
    const A inverse = inverse_rms(group, value, head_dim, parts.eps);
    const A dot = group.template sum<A>(
        head_dim, [=](std::int64_t i) { return grad(i) * weight[i] * (value(i) * inverse); });
    const A mean = dot / static_cast<A>(head_dim);
    group.for_each(head_dim, [=](std::int64_t i) {
      const A g = grad(i);
      const A normalised = value(i) * inverse;
      dweight[i] += g * normalised;
      write(result, dbias, i, inverse * (g * weight[i] - normalised * mean));
    });
  }

  KOKKOS_INLINE_FUNCTION static void write(T* result, A* dbias, std::int64_t i, A gradient) {
    result[i] = store_as<T>(gradient);
    if (dbias != nullptr) dbias[i] += gradient;
  }
};

template <class T>
void run_head_forward(const ExecutionSpace& space, std::span<const HeadForward<T>> groups) {
  for (const HeadForward<T>& group : groups) {
    for_each_row(space, "layerstream::head_transform_forward", group.tokens * group.heads,
                 HeadForwardRow<T>{group});
  }
}

/// Rows of (H, d) partial sums: one for each block of tokens.
inline std::int64_t head_partial_rows(std::int64_t tokens) {
  return row_blocks(tokens).count;
}

template <class T, class D>
void run_head_backward(const ExecutionSpace& space, const HeadBackward<T>& args, MathOf<T>* workspace) {
  using A = MathOf<T>;
  const RowBlocks blocks = row_blocks(args.tokens);
  const std::int64_t columns = args.heads * args.head_dim;
  A* const bias_partials = args.dbias == nullptr ? nullptr : workspace;
  A* const norm_partials = args.dnorm_weight == nullptr ? nullptr : workspace + blocks.count * columns;
  for_each_row(space, "layerstream::head_transform_backward", blocks.count * args.heads,
               HeadBackwardBlock<T, D>{args, blocks.rows_per_block, bias_partials, norm_partials});
  if (bias_partials != nullptr) {
    add_column_sums(space, "layerstream::head_transform_dbias", args.dbias, bias_partials, blocks.count,
                    columns);
  }
  if (norm_partials != nullptr && blocks.count > 0) {
    // First the blocks of each head, into the first block's place; then the heads.
    add_column_sums(space, "layerstream::head_transform_dnorm_heads", norm_partials, norm_partials + columns,
                    blocks.count - 1, columns);
    add_column_sums(space, "layerstream::head_transform_dnorm", args.dnorm_weight, norm_partials, args.heads,
                    args.head_dim);
  }
}

/// One group after the other, all in the same workspace.
template <class T>
void run_head_backward(const ExecutionSpace& space, std::span<const HeadBackward<T>> groups,
                       MathOf<T>* workspace) {
  for (const HeadBackward<T>& group : groups) {
    if (group.has_wide_dout) {
      run_head_backward<T, MathOf<T>>(space, group, workspace);
    } else {
      run_head_backward<T, T>(space, group, workspace);
    }
  }
}

}  // namespace layerstream::ops::detail
