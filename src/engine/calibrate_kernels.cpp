#include "engine/calibrate_kernels.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "core/half.hpp"
#include "core/ledger.hpp"
#include "core/random.hpp"
#include "engine/calibrate_memory.hpp"
#include "engine/device_timer.hpp"
#include "ops/adamw.hpp"
#include "ops/attention.hpp"
#include "ops/elementwise.hpp"
#include "ops/linear.hpp"

namespace layerstream {
namespace {

/// Hands out the memory from its beginning; `fits` says whether it was enough.
class Layout {
 public:
  explicit Layout(std::span<std::byte> memory) : memory_(memory) {}

  TensorView tensor(DType dtype, Shape shape) {
    const std::size_t bytes =
        (static_cast<std::size_t>(shape.numel()) * size_of(dtype) + Arena::alignment - 1) / Arena::alignment *
        Arena::alignment;
    std::byte* const at = memory_.data() + used_;
    used_ += bytes;
    return {fits() ? at : memory_.data(), dtype, shape};
  }
  ops::Context context(Device& device, ops::Libraries& libraries, std::size_t workspace) {
    const TensorView bytes = tensor(DType::i16, {static_cast<std::int64_t>(workspace / 2 + 1)});
    return {.stream = device.stream(Lane::compute),
            .workspace = bytes.data(),
            .workspace_bytes = workspace,
            .libraries = &libraries};
  }
  std::size_t used() const { return used_; }
  bool fits() const { return used_ <= memory_.size(); }

 private:
  std::span<std::byte> memory_;
  std::size_t used_ = 0;
};

}  // namespace

KernelCalibration::KernelCalibration(Device& device, ops::Libraries& libraries, const ModelSpec& spec,
                                     std::span<std::byte> memory, double budget)
    : device_(device), libraries_(libraries), spec_(spec), memory_(memory), budget_(budget) {
  libraries.prepare(device.stream(Lane::compute));
}

/// Everything becomes small normal numbers, in bf16 as in fp32: a GPU draws less power, and runs faster, on
/// zeros. They repeat with a prime period, so that no row is like another.
void KernelCalibration::fill(std::size_t bytes) {
  constexpr std::size_t period = 1'000'003;
  std::vector<bf16> numbers(std::min(period, bytes / sizeof(bf16)));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = to_bf16(static_cast<float>(0.1 * normal_at(1, 0, i)));
  }
  const StreamView stream = device_.stream(Lane::compute);
  std::size_t filled = numbers.size() * sizeof(bf16);
  device_.link().copy(memory_.data(), numbers.data(), filled, stream);
  while (filled < bytes) {
    const std::size_t count = std::min(filled, bytes - filled);
    device_.link().copy(memory_.data() + filled, memory_.data(), count, stream);
    filled += count;
  }
  device_.synchronize();
}

namespace {

/// The products of a decoder layer over T tokens.
struct Products {
  struct Matrix {
    TensorView weight, gradient, x, y, dx;
  };
  std::vector<Matrix> matrices;
  ops::Context context{StreamView::host()};
  double flops = 0.0;

  void run() const {
    for (const Matrix& m : matrices) {
      ops::linear_forward(context, m.y, m.x, m.weight);
      ops::linear_backward_input(context, m.dx, m.y, m.weight);
      ops::linear_backward_weight(context, m.gradient, m.y, m.x);
    }
  }
};

Products layer_products(Layout& layout, Device& device, ops::Libraries& libraries, const ModelSpec& spec,
                        DType compute, std::int64_t tokens) {
  const std::int64_t h = spec.hidden_size, q = spec.query_size(), f = spec.intermediate_size;
  const std::int64_t fused = q + 2 * spec.key_value_size();
  Products products;
  products.context = layout.context(device, libraries, ops::linear_workspace(compute));
  const std::int64_t widest = std::max({h, q, f, fused, 2 * f});
  const TensorView x = layout.tensor(compute, {tokens, widest});
  const TensorView y = layout.tensor(compute, {tokens, widest});
  const TensorView dx = layout.tensor(compute, {tokens, widest});
  for (const auto& [out, in] : {std::array{fused, h}, {h, q}, {2 * f, h}, {h, f}}) {
    const auto part = [&](const TensorView& view, std::int64_t columns) {
      return TensorView(view.data(), compute, {tokens, columns});
    };
    products.matrices.push_back({.weight = layout.tensor(compute, {out, in}),
                                 .gradient = layout.tensor(accumulator_of(compute), {out, in}),
                                 .x = part(x, in),
                                 .y = part(y, out),
                                 .dx = part(dx, in)});
    products.flops += 3.0 * 2.0 * static_cast<double>(tokens) * static_cast<double>(out * in);
  }
  return products;
}

}  // namespace

double KernelCalibration::products(DType compute, std::int64_t tokens) {
  Layout layout(memory_);
  const Products work = layer_products(layout, device_, libraries_, spec_, compute, tokens);
  if (!layout.fits()) return 0.0;
  fill(layout.used());
  return work.flops / DeviceTimer(device_, budget_).seconds_of(work.context.stream, [&] { work.run(); });
}

void KernelCalibration::warm_up(DType compute, std::int64_t tokens, double seconds) {
  Layout layout(memory_);
  const Products work = layer_products(layout, device_, libraries_, spec_, compute, tokens);
  if (!layout.fits()) return;
  fill(layout.used());
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    for (int i = 0; i < 4; ++i) work.run();
    device_.synchronize();
  }
}

KernelCalibration::Attention KernelCalibration::attention(DType compute, std::int64_t row_tokens,
                                                          std::int64_t tokens) {
  const std::int64_t rows = std::max<std::int64_t>(1, tokens / row_tokens);
  const std::int64_t t = rows * row_tokens;
  const std::int64_t heads = spec_.num_attention_heads, shared = spec_.num_key_value_heads;
  const std::int64_t d = spec_.head_dim;
  Layout layout(memory_);
  const ops::Context context = layout.context(device_, libraries_,
                                              ops::attention_workspace({.num_attention_heads = heads,
                                                                        .num_key_value_heads = shared,
                                                                        .head_dim = d,
                                                                        .compute = compute,
                                                                        .queries = t,
                                                                        .keys = t}));
  const TensorView q = layout.tensor(compute, {t, heads, d});
  const TensorView k = layout.tensor(compute, {t, shared, d});
  const TensorView v = layout.tensor(compute, {t, shared, d});
  const TensorView o = layout.tensor(compute, {t, heads, d});
  const TensorView dout = layout.tensor(compute, {t, heads, d});
  const TensorView dq = layout.tensor(compute, {t, heads, d});
  const DType accumulator = accumulator_of(compute);
  const TensorView lse = layout.tensor(accumulator, {t, heads});
  const TensorView dk = layout.tensor(accumulator, {t, shared, d});
  const TensorView dv = layout.tensor(accumulator, {t, shared, d});
  if (!layout.fits()) return {};
  fill(layout.used());
  std::vector<ops::AttentionSegment> segments;
  for (std::int64_t row = 0; row < rows; ++row) {
    segments.push_back({.first_query = row * row_tokens,
                        .num_queries = row_tokens,
                        .first_key = row * row_tokens,
                        .num_keys = row_tokens});
  }
  const ops::AttentionSettings settings{.scale = 1.0 / std::sqrt(static_cast<double>(d))};
  const double pairs = static_cast<double>(rows) * 0.5 * static_cast<double>(row_tokens * (row_tokens + 1));
  const double flops = 4.0 * static_cast<double>(heads * d) * pairs;
  const DeviceTimer timer(device_, budget_);
  Attention rates;
  rates.forward = flops / timer.seconds_of(context.stream, [&] {
    ops::attention_forward(context, {.o = o, .lse = lse, .q = q, .k = k, .v = v}, segments, settings);
  });
  const auto backward = [&](bool deterministic) {
    ops::AttentionSettings ordered = settings;
    ordered.deterministic = deterministic;
    return 2.5 * flops / timer.seconds_of(context.stream, [&] {
      ops::attention_backward(
          context, {.dq = dq, .dk = dk, .dv = dv, .dout = dout, .q = q, .k = k, .v = v, .o = o, .lse = lse},
          segments, ordered);
    });
  };
  rates.backward = backward(true);
  rates.backward_nondeterministic = device_.uses_host_memory() ? rates.backward : backward(false);
  return rates;
}

double KernelCalibration::copy_bytes_per_second() {
  const std::size_t bytes = std::min(memory_.size() / 2, std::size_t{1} << 30) / 4096 * 4096;
  const StreamView stream = device_.stream(Lane::compute);
  return 2.0 * static_cast<double>(bytes) / DeviceTimer(device_, budget_).seconds_of(stream, [&] {
    device_.link().copy(memory_.data() + bytes, memory_.data(), bytes, stream);
  });
}

namespace {

/// Parameters a second of one slice over memory that a kernel can reach.
double adamw_over(Device& device, const ops::Context& context, std::span<std::byte> memory, double budget,
                  int thread_blocks = 0) {
  const std::span<std::byte> used = memory.first(std::min(memory.size(), std::size_t{1} << 30));
  const ops::AdamWSlice slice = slice_over(used);
  ops::fill_zero(context, TensorView(used.data(), DType::f32, {4 * slice.n}));
  const ops::AdamWScalars scalars = ops::adamw_scalars({.learning_rate = 1e-3});
  return static_cast<double>(slice.n) / DeviceTimer(device, budget).seconds_of(context.stream, [&] {
    ops::adamw_device(context, slice, slice.n, scalars, scalars, thread_blocks);
  });
}

}  // namespace

double KernelCalibration::adamw_parameters_per_second() {
  const ops::Context context{.stream = device_.stream(Lane::compute), .libraries = &libraries_};
  return adamw_over(device_, context, memory_, budget_);
}

double KernelCalibration::kernel_seconds() {
  const ops::Context context{.stream = device_.stream(Lane::compute), .libraries = &libraries_};
  const TensorView few(memory_.data(), DType::f32, {64});
  return DeviceTimer(device_, budget_).seconds_of(context.stream, [&] { ops::fill_zero(context, few); });
}

KernelCalibration::OnHostMemory KernelCalibration::on_host_memory(std::span<std::byte> host) {
  const ops::Context context{.stream = device_.stream(Lane::compute), .libraries = &libraries_};
  const DeviceTimer timer(device_, budget_);
  // Three arrays of fp32, on either side.
  const std::size_t array =
      std::min({memory_.size() / 2, host.size() / 2, std::size_t{256} << 20}) / 4096 * 4096;
  const auto view = [&](std::span<std::byte> memory, std::size_t index) {
    return TensorView(memory.data() + index * array, DType::f32, {static_cast<std::int64_t>(array / 4)});
  };
  OnHostMemory rates;
  for (const int blocks : {4, 8, 16, 32, 64, 132}) {
    rates.adamw.push_back({blocks, adamw_over(device_, context, host, budget_, blocks)});
    if (device_.uses_host_memory()) break;  // threads are what they are
  }
  rates.write_bytes_per_second = static_cast<double>(array) / timer.seconds_of(context.stream, [&] {
    ops::fill_zero(context, view(host, 0));
  });
  rates.read_bytes_per_second = 2.0 * static_cast<double>(array) / timer.seconds_of(context.stream, [&] {
    ops::add(context, view(memory_, 0), view(host, 0), view(host, 1));
  });
  return rates;
}

}  // namespace layerstream
