#include "ops/kernel_labels.hpp"

#include <Kokkos_Core.hpp>
#include <atomic>
#include <cstdint>

#include "core/error.hpp"

namespace layerstream::ops {
namespace {

namespace tools = Kokkos::Tools::Experimental;

// Kokkos' callbacks carry no context.
std::atomic<KernelListener*> current_listener{nullptr};
std::atomic<bool> in_use{false};

void begin_kernel(const char* label, std::uint32_t, std::uint64_t* id) {
  *id = 0;
  if (KernelListener* const listener = current_listener.load(std::memory_order_relaxed))
    listener->begin_kernel(label);
}

void end_kernel(std::uint64_t) {
  if (KernelListener* const listener = current_listener.load(std::memory_order_relaxed))
    listener->end_kernel();
}

void request_settings(std::uint32_t, Kokkos_Tools_ToolSettings* settings) {
  settings->requires_global_fencing = false;
}

void set_kernel_callbacks(Kokkos_Profiling_beginFunction begin, Kokkos_Profiling_endFunction end) {
  tools::set_begin_parallel_for_callback(begin);
  tools::set_end_parallel_for_callback(end);
  tools::set_begin_parallel_reduce_callback(begin);
  tools::set_end_parallel_reduce_callback(end);
  tools::set_begin_parallel_scan_callback(begin);
  tools::set_end_parallel_scan_callback(end);
}

}  // namespace

KernelLabels::KernelLabels() {
  LAYERSTREAM_EXPECT(!Kokkos::is_initialized(),
                     "kernel labels are asked for after the kernels' runtime began");
  LAYERSTREAM_EXPECT(!in_use.exchange(true), "kernel labels exist already");
  tools::set_request_tool_settings_callback(request_settings);
}

KernelLabels::~KernelLabels() {
  tell(nullptr);
  tools::set_request_tool_settings_callback(nullptr);
  in_use = false;
}

void KernelLabels::tell(KernelListener* listener) noexcept {
  if (listener == current_listener.load()) return;
  current_listener = listener;
  if (listener != nullptr) {
    set_kernel_callbacks(begin_kernel, end_kernel);
  } else {
    set_kernel_callbacks(nullptr, nullptr);
  }
}

}  // namespace layerstream::ops
