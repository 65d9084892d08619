// Device kernels against the speed at which the device copies its own memory, one table:
//   kernels [tokens = 8192]
// Shapes of a 7B model (hidden 3584, feed-forward 18944, 28 query and 4 key heads of 128, vocabulary 152064),
// bf16 activations. Bytes are those that must move: every input once (logits twice), every output once; the
// copy's are one read and one write per byte. Besides with a copy of 1 GiB, each kernel is compared with a
// copy that moves as many bytes as the kernel does: launch, ramp and tail count for that as well. A figure is
// the median of 20 launches by CUDA events; before each, 256 MB of other memory are overwritten, so that no
// input lies in a cache.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/cuda_error.hpp"
#include "core/random.hpp"
#include "core/tensor.hpp"
#include "ops/adamw.hpp"
#include "ops/elementwise.hpp"
#include "ops/embedding.hpp"
#include "ops/heads.hpp"
#include "ops/libraries.hpp"
#include "ops/linear.hpp"
#include "ops/loss.hpp"
#include "ops/norm.hpp"
#include "ops/runtime.hpp"

namespace {

using namespace layerstream;

constexpr std::int64_t hidden_size = 3584, intermediate_size = 18944, vocab_size = 152064;
constexpr std::int64_t query_heads = 28, key_heads = 4, head_dim = 128;
constexpr std::int64_t layer_parameters = 233'057'792;
constexpr std::size_t flushed_bytes = std::size_t{256} << 20, copied_bytes = std::size_t{1} << 30;
constexpr int repetitions = 20;

/// One allocation of device memory, handed out from its beginning.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) { LAYERSTREAM_CUDA(cudaMalloc(&memory_, bytes)); }
  ~DeviceMemory() { (void)cudaFree(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void reset() { used_ = 0; }
  TensorView take(DType dtype, Shape shape) {
    const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
    LAYERSTREAM_EXPECT(used_ + bytes <= bytes_, "benchmark: {} bytes of device memory are too few", bytes_);
    const TensorView view(static_cast<char*>(memory_) + used_, dtype, shape);
    used_ += (bytes + 255) / 256 * 256;
    return view;
  }

 private:
  std::size_t bytes_, used_ = 0;
  void* memory_ = nullptr;
};

/// A block of random numbers that tensors are filled with, over and over.
template <class T, class Make>
std::vector<T> random_block(const Make& make) {
  std::vector<T> values(std::size_t{1} << 20);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = make(normal_at(1, 0, i));
  return values;
}

class Bench {
 public:
  Bench()
      : memory_(std::size_t{12} << 30),
        copied_(2 * copied_bytes),
        flushed_(flushed_bytes),
        workspace_(std::size_t{256} << 20) {
    LAYERSTREAM_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    LAYERSTREAM_CUDA(cudaEventCreate(&begin_));
    LAYERSTREAM_CUDA(cudaEventCreate(&end_));
    copied_view_ = copied_.take(DType::u8, {static_cast<std::int64_t>(2 * copied_bytes)});
    LAYERSTREAM_CUDA(cudaMemset(copied_view_.data(), 0x3c, 2 * copied_bytes));
    flushed_view_ = flushed_.take(DType::u8, {static_cast<std::int64_t>(flushed_bytes)});
    workspace_view_ = workspace_.take(DType::u8, {std::int64_t{256} << 20});
  }
  ~Bench() {
    (void)cudaEventDestroy(end_);
    (void)cudaEventDestroy(begin_);
    (void)cudaStreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  ops::Context context() {
    return {StreamView(static_cast<void*>(stream_)), workspace_view_.data(),
            static_cast<std::size_t>(workspace_view_.numel()), &libraries_};
  }
  cudaStream_t stream() const { return stream_; }

  void next_case() { memory_.reset(); }
  TensorView uninitialised(DType dtype, Shape shape) { return memory_.take(dtype, shape); }
  TensorView normal(DType dtype, Shape shape) {
    const TensorView view = memory_.take(dtype, shape);
    if (dtype == DType::bf16) {
      fill(view, halves_);
    } else {
      fill(view, singles_);
    }
    return view;
  }
  TensorView integers(const std::vector<std::int32_t>& values) {
    const TensorView view = memory_.take(DType::i32, {static_cast<std::int64_t>(values.size())});
    LAYERSTREAM_CUDA(
        cudaMemcpy(view.data(), values.data(), values.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
    return view;
  }

  /// Seconds of one run.
  double time(const std::function<void()>& run) {
    std::vector<double> seconds;
    for (int i = -2; i < repetitions; ++i) {
      LAYERSTREAM_CUDA(cudaMemsetAsync(flushed_view_.data(), i, flushed_bytes, stream_));
      LAYERSTREAM_CUDA(cudaEventRecord(begin_, stream_));
      run();
      LAYERSTREAM_CUDA(cudaEventRecord(end_, stream_));
      LAYERSTREAM_CUDA(cudaEventSynchronize(end_));
      float milliseconds = 0.0f;
      LAYERSTREAM_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
      if (i >= 0) seconds.push_back(milliseconds * 1e-3);
    }
    std::nth_element(seconds.begin(), seconds.begin() + repetitions / 2, seconds.end());
    return seconds[repetitions / 2];
  }

  void measure_copy() {
    constexpr double bytes = 2.0 * static_cast<double>(copied_bytes);
    copy_rate_ = bytes / copy_seconds(bytes);
    fmt::print("copy of 1 GiB: {:.0f} GB/s, read and write\n\n", copy_rate_ * 1e-9);
    fmt::print("| kernel                               |    us  |  GB/s | of the copy | of one its size |\n");
    fmt::print("|--------------------------------------|--------|-------|-------------|-----------------|\n");
  }

  void report(const std::string& name, double bytes, const std::function<void()>& run) {
    const double seconds = time(run);
    fmt::print("| {:<36} | {:>6.1f} | {:>5.0f} | {:>11.2f} | {:>15.2f} |\n", name, seconds * 1e6,
               bytes / seconds * 1e-9, bytes / seconds / copy_rate_, copy_seconds(bytes) / seconds);
    std::fflush(stdout);
  }

 private:
  template <class T>
  void fill(const TensorView& view, const std::vector<T>& block) {
    const std::size_t bytes = static_cast<std::size_t>(view.numel()) * sizeof(T);
    const std::size_t first = std::min(bytes, block.size() * sizeof(T));
    char* const memory = static_cast<char*>(view.data());
    LAYERSTREAM_CUDA(cudaMemcpy(memory, block.data(), first, cudaMemcpyHostToDevice));
    for (std::size_t done = first; done < bytes;) {
      const std::size_t more = std::min(done, bytes - done);
      LAYERSTREAM_CUDA(cudaMemcpy(memory + done, memory, more, cudaMemcpyDeviceToDevice));
      done += more;
    }
    LAYERSTREAM_CUDA(cudaDeviceSynchronize());
  }

  /// Of one copy that reads and writes `bytes` in all; of a longer one than was measured, at that one's rate.
  double copy_seconds(double bytes) {
    if (bytes > 2.0 * static_cast<double>(copied_bytes)) return bytes / copy_rate_;
    const auto count = static_cast<std::size_t>(bytes / 2.0);
    const auto [entry, is_new] = seconds_of_copy_.try_emplace(count, 0.0);
    if (is_new) {
      char* const from = static_cast<char*>(copied_view_.data());
      entry->second = time([&] {
        LAYERSTREAM_CUDA(
            cudaMemcpyAsync(from + copied_bytes, from, count, cudaMemcpyDeviceToDevice, stream_));
      });
    }
    return entry->second;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  ops::Libraries libraries_;
  DeviceMemory memory_, copied_, flushed_, workspace_;
  TensorView copied_view_, flushed_view_, workspace_view_;
  std::vector<float> singles_ = random_block<float>([](double x) { return static_cast<float>(x); });
  std::vector<bf16> halves_ = random_block<bf16>([](double x) { return to_bf16(static_cast<float>(x)); });
  double copy_rate_ = 0.0;
  std::map<std::size_t, double> seconds_of_copy_;  // by bytes read
};

void elementwise_kernels(Bench& bench, std::int64_t tokens) {
  const double hidden = static_cast<double>(tokens * hidden_size);
  const double wide = static_cast<double>(tokens * intermediate_size);
  bench.next_case();
  TensorView a = bench.normal(DType::bf16, {tokens, hidden_size}), b = bench.normal(DType::bf16, a.shape());
  TensorView c = bench.uninitialised(DType::bf16, a.shape());
  bench.report("add", 6 * hidden, [&] { ops::add(bench.context(), c, a, b); });
  TensorView bias = bench.normal(DType::f32, {hidden_size});
  bench.report("add_bias", 4 * hidden, [&] { ops::add_bias(bench.context(), a, bias); });
  bench.report("bias_backward", 2 * hidden, [&] { ops::bias_backward(bench.context(), bias, b); });

  bench.next_case();
  TensorView gate_up = bench.normal(DType::bf16, {tokens, 2 * intermediate_size});
  TensorView act = bench.normal(DType::bf16, {tokens, intermediate_size});
  TensorView dgate_up = bench.uninitialised(DType::bf16, gate_up.shape());
  bench.report("swiglu_forward", 6 * wide, [&] { ops::swiglu_forward(bench.context(), act, gate_up); });
  bench.report("swiglu_backward", 10 * wide,
               [&] { ops::swiglu_backward(bench.context(), dgate_up, act, gate_up); });

  bench.next_case();
  const double layer = static_cast<double>(layer_parameters);
  TensorView hi = bench.normal(DType::bf16, {layer_parameters}),
             lo = bench.uninitialised(DType::i16, hi.shape());
  TensorView exp_avg = bench.normal(DType::f32, hi.shape()),
             exp_avg_sq = bench.uninitialised(DType::f32, hi.shape());
  TensorView gradient = bench.normal(DType::f32, hi.shape()), result = bench.uninitialised(DType::f64, {1});
  bench.report("merge_halves", 8 * layer, [&] { ops::merge_halves(bench.context(), exp_avg_sq, hi, lo); });
  bench.report("fill_zero", 4 * layer, [&] { ops::fill_zero(bench.context(), exp_avg_sq); });
  bench.report("sum_of_squares", 4 * layer,
               [&] { ops::sum_of_squares(bench.context(), result.as<double>(), gradient); });
  const ops::AdamWScalars scalars =
      ops::adamw_scalars({.learning_rate = 1e-5, .weight_decay = 0.01, .step = 10});
  bench.report("adamw_device", 28 * layer, [&] {
    ops::adamw_device(bench.context(),
                      {hi.as<bf16>(), lo.as<std::int16_t>(), exp_avg.as<float>(), exp_avg_sq.as<float>(),
                       gradient.as<float>(), layer_parameters},
                      layer_parameters - 2 * hidden_size, scalars, scalars);
  });
}

void norm_kernels(Bench& bench, std::int64_t tokens) {
  const double hidden = static_cast<double>(tokens * hidden_size);
  bench.next_case();
  TensorView x = bench.normal(DType::bf16, {tokens, hidden_size}), dy = bench.normal(DType::bf16, x.shape());
  TensorView residual = bench.normal(DType::bf16, x.shape()),
             dx = bench.uninitialised(DType::bf16, x.shape());
  TensorView weight = bench.normal(DType::f32, {hidden_size}),
             dweight = bench.normal(DType::f32, weight.shape());
  bench.report("rms_norm_forward", 4 * hidden,
               [&] { ops::rms_norm_forward(bench.context(), dx, x, weight, 1e-6); });
  struct Variant {
    const char* name;
    int passes;  // over (T, H)
    ConstTensorView residual;
    TensorView y;
  };
  TensorView y = bench.uninitialised(DType::bf16, x.shape());
  for (const auto& [name, passes, bypass, again] :
       {Variant{"rms_norm_backward", 3, {}, {}}, Variant{"rms_norm_backward, residual", 4, residual, {}},
        Variant{"rms_norm_backward, residual, y", 5, residual, y}}) {
    bench.report(name, 2 * passes * hidden, [&, bypass = bypass, again = again] {
      ops::rms_norm_backward(bench.context(), {.dx = dx,
                                               .dweight = dweight,
                                               .y = again,
                                               .dy = dy,
                                               .x = x,
                                               .weight = weight,
                                               .residual = bypass,
                                               .eps = 1e-6});
    });
  }
}

/// Queries, keys and values of a projection with bias and rope or with norm and rope, as a decoder layer has
/// them: in one call each way; values have no norm and no rope; gradients of keys and values are FP32.
void head_kernels(Bench& bench, std::int64_t tokens) {
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::int32_t>(i);
  constexpr std::int64_t query_size = query_heads * head_dim, key_size = key_heads * head_dim;
  constexpr std::int64_t stride = query_size + 2 * key_size;
  for (const bool norm : {false, true}) {
    bench.next_case();
    TensorView query_raw = bench.normal(DType::bf16, {tokens, query_size}),
               key_value_raw = bench.normal(DType::bf16, {tokens, 2 * key_size}),
               draw = bench.uninitialised(DType::bf16, {tokens, stride});
    const TensorView cos = bench.normal(DType::f32, {tokens, head_dim / 2}),
                     sin = bench.normal(DType::f32, cos.shape()), positions = bench.integers(numbers);
    std::vector<ops::HeadTransformForward> forward;
    std::vector<ops::HeadGroupBackward> backward;
    double forward_bytes = 0.0, backward_bytes = 0.0;
    for (const std::int64_t first : {std::int64_t{0}, query_size, query_size + key_size}) {
      const bool is_query = first == 0, is_value = first == query_size + key_size;
      const std::int64_t heads = is_query ? query_heads : key_heads, width = heads * head_dim;
      ops::HeadTransform transform;
      TensorView dbias, dweight;
      if (!is_value) {
        transform.cos = cos;
        transform.sin = sin;
        transform.positions = positions;
      }
      if (!norm) {
        transform.bias = bench.normal(DType::f32, {width});
        dbias = bench.normal(DType::f32, {width});
      } else if (!is_value) {
        transform.norm_weight = bench.normal(DType::f32, {head_dim});
        transform.norm_eps = 1e-6;
        dweight = bench.normal(DType::f32, {head_dim});
      }
      const TensorView raw = is_query ? query_raw : key_value_raw;
      const ops::HeadColumns columns{raw.dim(1), is_value ? key_size : 0};
      forward.push_back(
          {bench.uninitialised(DType::bf16, {tokens, heads, head_dim}), raw, columns, transform});
      backward.push_back(
          {{.draw = draw,
            .draw_columns = {stride, first},
            .dout = bench.normal(is_query ? DType::bf16 : DType::f32, {tokens, heads, head_dim}),
            .raw = raw,
            .raw_columns = columns,
            .dbias = dbias,
            .dnorm_weight = dweight},
           transform});
      const double elements = static_cast<double>(tokens * width);
      forward_bytes += 4 * elements;
      backward_bytes += ((is_query ? 4 : 6) + (dweight ? 2 : 0)) * elements;
    }
    // The angles of every position once, in either direction.
    const double angle_bytes = static_cast<double>(2 * cos.numel()) * 4.0;
    const std::string what = fmt::format("{}, rope", norm ? "norm" : "bias");
    bench.report("head forward, q, k, v, " + what, forward_bytes + angle_bytes,
                 [&] { ops::head_transform_forward(bench.context(), forward); });
    bench.report("head backward, q, k, v, " + what, backward_bytes + angle_bytes,
                 [&] { ops::head_transform_backward(bench.context(), backward); });
    const std::span<const ops::HeadTransformForward> groups = forward;
    bench.report("head forward, k, v, " + what, 8 * static_cast<double>(tokens * key_size) + angle_bytes,
                 [&] { ops::head_transform_forward(bench.context(), groups.subspan(1)); });
    bench.report("head forward, q, " + what, 4 * static_cast<double>(tokens * query_size) + angle_bytes,
                 [&] { ops::head_transform_forward(bench.context(), groups.first(1)); });
  }
}

/// Token numbers as text has them: the k-th most frequent has a share of about 1/k.
std::vector<std::int32_t> text_like_ids(std::int64_t tokens) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(std::pow(static_cast<double>(vocab_size), uniform_at(2, 0, i))) - 1;
  }
  return ids;
}

void embedding_kernels(Bench& bench, std::int64_t tokens) {
  std::vector<std::int32_t> spread(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < spread.size(); ++i) {
    spread[i] = static_cast<std::int32_t>(uniform_at(3, 0, i) * static_cast<double>(vocab_size));
  }
  const std::vector<std::int32_t> equal(spread.size(), 7);
  bench.next_case();
  TensorView table = bench.normal(DType::bf16, {vocab_size, hidden_size});
  TensorView dtable = bench.normal(DType::f32, {vocab_size, hidden_size});
  TensorView out = bench.normal(DType::bf16, {tokens, hidden_size});
  const double hidden = static_cast<double>(tokens * hidden_size);
  for (const auto& [name, values] :
       {std::pair{"random ids", spread}, std::pair{"text-like ids", text_like_ids(tokens)},
        std::pair{"equal ids", equal}}) {
    std::vector<std::int32_t> distinct = values;
    std::sort(distinct.begin(), distinct.end());
    const double rows = static_cast<double>(std::unique(distinct.begin(), distinct.end()) - distinct.begin());
    const TensorView ids = bench.integers(values);
    const TensorView by_id = bench.integers(ops::tokens_by_id(values)).reshape({tokens, 4});
    bench.report(fmt::format("embedding_forward, {}", name), 2 * hidden + 2 * rows * hidden_size,
                 [&] { ops::embedding_forward(bench.context(), out, ConstTensorView(table), ids); });
    bench.report(fmt::format("embedding_backward, {}", name), 2 * hidden + 8 * rows * hidden_size,
                 [&] { ops::embedding_backward(bench.context(), dtable, out, ids, by_id); });
  }
}

void loss_kernels(Bench& bench, std::int64_t tokens) {
  bench.next_case();
  TensorView logits = bench.normal(DType::f32, {tokens, vocab_size});
  TensorView dlogits = bench.uninitialised(DType::bf16, logits.shape());
  TensorView nll = bench.uninitialised(DType::f64, {tokens}), result = bench.uninitialised(DType::f64, {1});
  TensorView targets = bench.integers(text_like_ids(tokens));
  const double elements = static_cast<double>(tokens * vocab_size);
  bench.report("cross_entropy", 10 * elements, [&] {
    ops::cross_entropy(bench.context(),
                       {.dlogits = dlogits, .nll = nll, .logits = logits, .targets = targets, .scale = 1e-4});
  });
  bench.report("cross_entropy, loss only", 4 * elements, [&] {
    ops::cross_entropy(bench.context(),
                       {.dlogits = {}, .nll = nll, .logits = logits, .targets = targets, .scale = 1e-4});
  });
  bench.report("add_sum (one thread adds)", 8.0 * static_cast<double>(tokens),
               [&] { ops::add_sum(bench.context(), result.as<double>(), nll); });
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t tokens = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 8192;
  if (tokens < 1) {
    fmt::print(stderr, "kernels [tokens]: at least 1\n");
    return exit_code::refused;
  }
  try {
    const ops::Runtime runtime;
    fmt::print("{}\n{} tokens, medians of {}\n", runtime.description(), tokens, repetitions);
    Bench bench;
    bench.measure_copy();
    elementwise_kernels(bench, tokens);
    norm_kernels(bench, tokens);
    head_kernels(bench, tokens);
    embedding_kernels(bench, tokens);
    loss_kernels(bench, tokens);
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return error.code();
  }
}
