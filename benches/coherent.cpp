// What a device that reaches host memory gains by using it where it lies, one table; over PCIe (emulated
// coherence: pinned, mapped memory) or on Grace Hopper:
//   coherent [GiB of host memory = 8]
// - rows of an embedding (152064 x 3584 bf16) gathered from the host against copying the table, and used rows
// of its fp32
//   gradient written to the host against copying the gradient;
// - AdamW on state in host memory by number of thread blocks, gradients on the host and on the device, alone
// and beside
//   matrix products, with what those lose;
// - a layer's weights brought by the copy engine and by a kernel, alone and beside matrix products.
// Figures are medians by CUDA events; random ids without order.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "backends/host_region.hpp"
#include "backends/make_device.hpp"
#include "core/random.hpp"
#include "core/worker_pool.hpp"
#include "engine/calibrate_memory.hpp"
#include "engine/device_timer.hpp"
#include "ops/adamw.hpp"
#include "ops/elementwise.hpp"
#include "ops/embedding.hpp"
#include "ops/libraries.hpp"
#include "ops/linear.hpp"
#include "ops/runtime.hpp"

namespace layerstream {
namespace {

constexpr std::int64_t vocab_size = 152064, hidden_size = 3584, intermediate_size = 18944;
constexpr double budget = 0.2;

class Bench {
 public:
  explicit Bench(std::size_t host_bytes)
      : device_(make_device({}, host_bytes)),
        pool_(8),
        host_(host_bytes, {.component = "benchmark", .pool = &pool_}),
        pin_(device_->pin(host_.data(), host_.bytes(), true, {})),
        region_(device_->allocate(std::size_t{8} << 30)),
        timer_(*device_, budget) {
    for (const Lane lane : {Lane::compute, Lane::update, Lane::h2d, Lane::d2h}) {
      libraries_.prepare(device_->stream(lane));
    }
    fmt::print("{}; {}\n\n", device_->description(),
               device_->capabilities().shares_host_page_tables ? "coherent"
                                                               : "coherence emulated: pinned, mapped memory");
  }

  void run() {
    rows();
    updates();
    promotions();
  }

 private:
  std::byte* host() const { return static_cast<std::byte*>(host_.data()); }
  std::byte* on_device() const { return static_cast<std::byte*>(region_->data()); }
  ops::Context context(Lane lane) {
    return {.stream = device_->stream(lane),
            .workspace = nullptr,
            .workspace_bytes = 0,
            .libraries = &libraries_};
  }
  double time(Lane lane, const std::function<void()>& work) {
    return timer_.seconds_of(device_->stream(lane), work);
  }

  void rows() {
    const Shape table{vocab_size, hidden_size};
    const auto elements = static_cast<std::size_t>(table.numel());
    fmt::print("{:<40} {:>8} {:>10} {:>10}\n", "embedding", "tokens", "MB moved", "ms");
    const double whole = time(Lane::h2d, [&] {
      device_->link().copy(on_device(), host(), 2 * elements, device_->stream(Lane::h2d));
    });
    fmt::print("{:<40} {:>8} {:>10.1f} {:>10.3f}\n", "copy the table (bf16)", "",
               2e-6 * static_cast<double>(elements), 1e3 * whole);
    const auto ids_of = [&](std::int64_t tokens) {
      std::vector<std::int32_t> ids;
      for (std::int64_t t = 0; t < tokens; ++t) {
        ids.push_back(
            static_cast<std::int32_t>(uniform_at(1, 0, static_cast<std::uint64_t>(t)) * vocab_size));
      }
      std::byte* const at = on_device() + (std::size_t{7} << 30);
      device_->link().copy(at, ids.data(), ids.size() * 4, device_->stream(Lane::compute));
      device_->synchronize();
      return TensorView(at, DType::i32, {tokens});
    };
    for (const std::int64_t tokens : {1024, 8192, 32768}) {
      const TensorView ids = ids_of(tokens);
      const TensorView out(on_device(), DType::bf16, {tokens, hidden_size});
      const double seconds = time(Lane::compute, [&] {
        ops::embedding_forward(context(Lane::compute), out,
                               ops::SplitMatrix{.hi = TensorView(host(), DType::bf16, table), .lo = {}}, ids);
      });
      fmt::print("{:<40} {:>8} {:>10.1f} {:>10.3f}\n", "gather rows from the host", tokens,
                 2e-6 * static_cast<double>(tokens * hidden_size), 1e3 * seconds);
    }
    const double back = time(Lane::d2h, [&] {
      device_->link().copy(host(), on_device(), 4 * elements, device_->stream(Lane::d2h));
    });
    fmt::print("{:<40} {:>8} {:>10.1f} {:>10.3f}\n", "copy the gradient (fp32) to the host", "",
               4e-6 * static_cast<double>(elements), 1e3 * back);
    const TensorView written(on_device() + (std::size_t{6} << 30), DType::u8, {vocab_size});
    for (const std::int64_t tokens : {1024, 8192, 32768}) {
      const TensorView ids = ids_of(tokens);
      const std::vector<std::uint8_t> none(vocab_size, 0);
      device_->link().copy(written.data(), none.data(), none.size(), device_->stream(Lane::d2h));
      const double seconds = time(Lane::d2h, [&] {
        ops::emit_rows(context(Lane::d2h), TensorView(host(), DType::f32, table),
                       TensorView(on_device(), DType::f32, table), written, ids);
      });
      std::vector<bool> used(vocab_size, false);
      for (std::int64_t t = 0; t < tokens; ++t) {
        used[static_cast<std::size_t>(uniform_at(1, 0, static_cast<std::uint64_t>(t)) * vocab_size)] = true;
      }
      const auto unique = static_cast<double>(std::count(used.begin(), used.end(), true));
      fmt::print("{:<40} {:>8} {:>10.1f} {:>10.3f}\n", "write its used rows to the host", tokens,
                 4e-6 * unique * hidden_size, 1e3 * seconds);
    }
  }

  /// Products of 8192 tokens with a layer's largest matrix, bf16.
  void product() {
    std::byte* const at = on_device() + (std::size_t{4} << 30);
    const TensorView x(at, DType::bf16, {8192, hidden_size});
    const TensorView weight(at + (std::size_t{512} << 20), DType::bf16, {2 * intermediate_size, hidden_size});
    const TensorView y(at + (std::size_t{1} << 30), DType::bf16, {8192, 2 * intermediate_size});
    ops::Context own = context(Lane::compute);
    own.workspace = at + (std::size_t{2} << 30);
    own.workspace_bytes = ops::linear_workspace(DType::bf16);
    ops::linear_forward(own, y, x, weight);
  }

  /// Seconds of `work` on its lane while products keep the device busy, and of a product meanwhile.
  std::array<double, 2> beside_products(Lane lane, const std::function<void()>& work, double alone) {
    const StreamView products = device_->stream(Lane::compute), other = device_->stream(lane);
    const int count = std::max(8, static_cast<int>(4.0 * alone / product_seconds_));
    const std::unique_ptr<DeviceClock> clock = device_->make_clock();
    clock->restart(4);
    clock->mark(0, other);
    work();
    clock->mark(1, other);
    clock->mark(2, products);
    int done = 0;
    for (; done < count; ++done) product();
    clock->mark(3, products);
    device_->synchronize();
    const double took = clock->seconds(1) - clock->seconds(0);
    const double all = clock->seconds(3) - clock->seconds(2);
    // Only part of the products ran beside the work; the others at their own speed.
    const double overlapped = std::min(took, all);
    const double beside = (done * product_seconds_ - (all - overlapped)) / overlapped;
    return {took, beside};
  }

  void updates() {
    product();
    product_seconds_ = time(Lane::compute, [&] { product(); });
    fmt::print("\nmatrix product of {} x {} over 8192 tokens: {:.0f} TFLOP/s alone\n", 2 * intermediate_size,
               hidden_size, 2e-12 * 8192 * 2 * intermediate_size * hidden_size / product_seconds_);
    fmt::print("\n{:<28} {:>16} {:>14} {:>20} {:>22}\n", "AdamW in place", "gradient on", "Gparam/s alone",
               "beside products", "products keep");
    const std::size_t slab_bytes = std::min(host_.bytes(), std::size_t{1} << 30);
    clear(pool_, {host(), slab_bytes});
    const ops::AdamWScalars scalars = ops::adamw_scalars({.learning_rate = 1e-3});
    for (const bool on_host : {true, false}) {
      ops::AdamWSlice slice = slice_over({host(), slab_bytes});
      if (!on_host) {
        ops::fill_zero(context(Lane::compute), TensorView(on_device(), DType::f32, {slice.n}));
        slice.gradient = reinterpret_cast<const float*>(on_device());
        device_->synchronize();
      }
      for (const int blocks : {2, 4, 8, 16, 24, 32, 64, 132, 0}) {
        const auto work = [&] {
          ops::adamw_device(context(Lane::update), slice, slice.n, scalars, scalars, blocks);
        };
        const double alone = time(Lane::update, work);
        const auto [beside, products] = beside_products(Lane::update, work, alone);
        const auto rate = [&](double seconds) { return 1e-9 * static_cast<double>(slice.n) / seconds; };
        fmt::print("{:<28} {:>16} {:>14.2f} {:>20.2f} {:>21.0f}%\n",
                   blocks == 0 ? "as many blocks as fit" : fmt::format("{} thread blocks", blocks),
                   on_host ? "host" : "device", rate(alone), rate(beside), 100.0 * products);
      }
    }
  }

  void promotions() {
    fmt::print("\n{:<28} {:>14} {:>14} {:>20} {:>22}\n", "promotion of 466 MB", "pieces", "GB/s alone",
               "GB/s beside products", "products keep");
    constexpr std::size_t bytes = 466'115'584;
    const auto measure = [&](const char* name, Link& link, std::size_t piece) {
      const auto work = [&] {
        for (std::size_t at = 0; at < bytes; at += piece) {
          link.copy(on_device() + at, host() + at, std::min(piece, bytes - at), device_->stream(Lane::h2d));
        }
      };
      const double alone = time(Lane::h2d, work);
      const auto [beside, products] = beside_products(Lane::h2d, work, alone);
      fmt::print("{:<28} {:>14} {:>14.1f} {:>20.1f} {:>21.0f}%\n", name, piece >= bytes ? "one" : "of 1 MiB",
                 1e-9 * bytes / alone, 1e-9 * bytes / beside, 100.0 * products);
    };
    for (const std::size_t piece : {bytes, std::size_t{1} << 20}) {
      measure("copy engine", device_->link(), piece);
      measure("kernel, 16 thread blocks", device_->kernel_link(), piece);
    }
  }

  std::unique_ptr<Device> device_;
  WorkerPool pool_;
  HostRegion host_;
  std::unique_ptr<HostPin> pin_;
  std::unique_ptr<DeviceRegion> region_;
  DeviceTimer timer_;
  ops::Libraries libraries_;
  double product_seconds_ = 0.0;
};

}  // namespace
}  // namespace layerstream

int main(int argc, char** argv) {
  const std::size_t gib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 8;
  const layerstream::ops::Runtime runtime;
  layerstream::Bench(gib << 30).run();
}
