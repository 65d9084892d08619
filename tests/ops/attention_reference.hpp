#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/attention.hpp"
#include "tests/support/random_tensor.hpp"

namespace layerstream::test {

/// Attention of one call: its inputs, and what the operation made of them.
struct AttentionCase {
  const char* name;
  std::int64_t heads, key_heads, head_dim;
  std::int64_t num_queries, num_keys;  // T, S
  std::vector<ops::AttentionSegment> segments;

  double scale() const { return 1.0 / std::sqrt(static_cast<double>(head_dim)); }
  ops::AttentionSettings settings(bool deterministic = true) const { return {scale(), deterministic}; }
  ops::AttentionLimits limits(DType compute, bool deterministic = true) const {
    ops::AttentionLimits limits{heads, key_heads, head_dim, compute, num_queries, num_keys};
    limits.deterministic = deterministic;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      limits.window = std::max(limits.window, segments[i].window);
      const bool same_queries =
          i > 0 && segments[i].num_queries > 0 && segments[i].first_query == segments[i - 1].first_query;
      limits.several_ranges = limits.several_ranges || same_queries;
    }
    return limits;
  }
  Shape query_shape() const { return {num_queries, heads, head_dim}; }
  Shape key_shape() const { return {num_keys, key_heads, head_dim}; }
};

/// The segments under one window.
inline std::vector<ops::AttentionSegment> under_window(std::int64_t window,
                                                       std::vector<ops::AttentionSegment> segments) {
  for (ops::AttentionSegment& segment : segments) segment.window = window;
  return segments;
}

/// The rows of the keys that a query sees.
using KeyRows = std::vector<std::int64_t>;

/// For each query row of a case.
inline std::vector<KeyRows> visible_rows(const AttentionCase& c) {
  std::vector<KeyRows> rows(static_cast<std::size_t>(c.num_queries));
  for (const ops::AttentionSegment& segment : c.segments) {
    for (std::int64_t i = 0; i < segment.num_queries; ++i) {
      const std::int64_t own = segment.num_keys - segment.num_queries + i;  // causal: its last key
      for (std::int64_t j = 0; j < segment.num_keys; ++j) {
        const bool in_window = segment.window == 0 || j > own - segment.window;
        if (segment.causal && (j > own || !in_window)) continue;
        rows[static_cast<std::size_t>(segment.first_query + i)].push_back(segment.first_key + j);
      }
    }
  }
  return rows;
}

/// The definition, in FP64: a sum over each query's keys. Beside every result stands its magnitude, the same
/// sum over absolute values, which rounding errors are proportional to.
struct AttentionReference {
  explicit AttentionReference(const AttentionCase& c) : AttentionReference(c, visible_rows(c)) {}
  AttentionReference(const AttentionCase& c, std::vector<KeyRows> visible_keys)
      : visible(std::move(visible_keys)),
        o(DType::f64, c.query_shape()),
        o_magnitude(DType::f64, c.query_shape()),
        lse(DType::f64, {c.num_queries, c.heads}),
        dq(constant_tensor(DType::f64, c.query_shape(), 0.0)),
        dk(constant_tensor(DType::f64, c.key_shape(), 0.0)),
        dv(dk),
        dq_magnitude(dq),
        dk_magnitude(dk),
        dv_magnitude(dk) {}

  std::vector<KeyRows> visible;  // to each query
  OwnedTensor o, o_magnitude, lse;
  OwnedTensor dq, dk, dv, dq_magnitude, dk_magnitude, dv_magnitude;
  double largest_score = 0.0;  // largest scale · sum |q| |k|, or |lse|
  std::int64_t most_summands = 0;
};

/// Calls visit(query row, head, key head, rows of keys) for every query and head.
template <class Visit>
void for_each_query(const AttentionCase& c, const std::vector<KeyRows>& rows, const Visit& visit) {
  for (std::int64_t row = 0; row < c.num_queries; ++row) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      visit(row, h, h / (c.heads / c.key_heads), rows[static_cast<std::size_t>(row)]);
    }
  }
}

struct Dot {
  double sum = 0.0, magnitude = 0.0;
};

/// Of rows of d numbers in fp64 tensors.
inline Dot dot_rows(const OwnedTensor& a, std::int64_t a_row, const OwnedTensor& b, std::int64_t b_row,
                    std::int64_t d) {
  const double* x = a.as<double>() + a_row * d;
  const double* y = b.as<double>() + b_row * d;
  Dot result;
  for (std::int64_t i = 0; i < d; ++i) {
    const double product = x[i] * y[i];
    result.sum += product;
    result.magnitude += std::fabs(product);
  }
  return result;
}

/// o and lse of fp64 inputs.
inline void reference_forward(const AttentionCase& c, const OwnedTensor& q, const OwnedTensor& k,
                              const OwnedTensor& v, AttentionReference& out) {
  const std::int64_t d = c.head_dim;
  const double* v_data = v.as<double>();
  for_each_query(c, out.visible, [&](std::int64_t row, std::int64_t h, std::int64_t kh, const KeyRows& keys) {
    const std::int64_t at = row * c.heads + h;
    std::vector<double> p(keys.size());
    double total = 0.0;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const Dot s = dot_rows(q, at, k, keys[j] * c.key_heads + kh, d);
      out.largest_score = std::max(out.largest_score, c.scale() * s.magnitude);
      p[j] = c.scale() * s.sum;
    }
    const double largest = *std::max_element(p.begin(), p.end());
    for (double& x : p) total += x = std::exp(x - largest);
    out.lse.set(at, largest + std::log(total));
    out.largest_score = std::max(out.largest_score, std::fabs(out.lse[at]));
    out.most_summands = std::max(out.most_summands, std::ssize(keys));
    for (std::int64_t i = 0; i < d; ++i) {
      double sum = 0.0, magnitude = 0.0;
      for (std::size_t j = 0; j < keys.size(); ++j) {
        const double product = p[j] / total * v_data[(keys[j] * c.key_heads + kh) * d + i];
        sum += product;
        magnitude += std::fabs(product);
      }
      out.o.set(at * d + i, sum);
      out.o_magnitude.set(at * d + i, magnitude);
    }
  });
}

/// dq, dk, dv of fp64 inputs, with the o and lse that the operation was given.
inline void reference_backward(const AttentionCase& c, const OwnedTensor& q, const OwnedTensor& k,
                               const OwnedTensor& v, const OwnedTensor& o, const OwnedTensor& lse,
                               const OwnedTensor& dout, AttentionReference& out) {
  const std::int64_t d = c.head_dim;
  const double *q_data = q.as<double>(), *k_data = k.as<double>(), *dout_data = dout.as<double>();
  const auto add = [](OwnedTensor& sums, OwnedTensor& magnitudes, std::int64_t i, double value,
                      double magnitude) {
    sums.as<double>()[i] += value;
    magnitudes.as<double>()[i] += std::fabs(magnitude);
  };
  for_each_query(c, out.visible, [&](std::int64_t row, std::int64_t h, std::int64_t kh, const KeyRows& keys) {
    const std::int64_t at = row * c.heads + h;
    const Dot delta = dot_rows(dout, at, o, at, d);
    for (const std::int64_t key_row : keys) {
      const std::int64_t key = key_row * c.key_heads + kh;
      const double p = std::exp(c.scale() * dot_rows(q, at, k, key, d).sum - lse[at]);
      const Dot dp = dot_rows(dout, at, v, key, d);
      const double ds = c.scale() * p * (dp.sum - delta.sum);
      const double magnitude = c.scale() * p * (dp.magnitude + delta.magnitude);
      for (std::int64_t i = 0; i < d; ++i) {
        add(out.dq, out.dq_magnitude, at * d + i, ds * k_data[key * d + i], magnitude * k_data[key * d + i]);
        add(out.dk, out.dk_magnitude, key * d + i, ds * q_data[at * d + i], magnitude * q_data[at * d + i]);
        add(out.dv, out.dv_magnitude, key * d + i, p * dout_data[at * d + i], p * dout_data[at * d + i]);
      }
    }
  });
}

/// Random inputs of a case in one dtype, and the operation's poisoned outputs.
struct AttentionTensors {
  AttentionTensors(const AttentionCase& c, DType dtype, std::uint64_t seed = 1)
      : q(normal_tensor(dtype, c.query_shape(), seed)),
        k(normal_tensor(dtype, c.key_shape(), seed + 1)),
        v(normal_tensor(dtype, c.key_shape(), seed + 2)),
        dout(normal_tensor(dtype, c.query_shape(), seed + 3)),
        o(dtype, c.query_shape()),
        lse(accumulator_of(dtype), {c.num_queries, c.heads}),
        dq(dtype, c.query_shape()),
        dk(constant_tensor(accumulator_of(dtype), c.key_shape(), 0.0)),
        dv(dk) {}

  OwnedTensor q, k, v, dout;
  OwnedTensor o, lse, dq, dk, dv;
};

}  // namespace layerstream::test
