#pragma once

namespace layerstream::ops {

/// Hears of kernels on the threads that launch them.
class KernelListener {
 public:
  virtual ~KernelListener() = default;
  /// @param label lives for the call only.
  virtual void begin_kernel(const char* label) = 0;
  virtual void end_kernel() = 0;
};

/// Tells a listener the label of every Kokkos kernel as it is launched, without waiting for the device around
/// it, as Kokkos does for tools that do not say otherwise. Kernels of cuBLAS and cuDNN have no labels. Kokkos
/// knows one such object: the first wins, and makers of a second get ContractError.
class KernelLabels {
 public:
  /// @pre no Runtime has been made: later Kokkos asks no more whether it is to wait. Throws ContractError.
  KernelLabels();
  ~KernelLabels();
  KernelLabels(const KernelLabels&) = delete;
  KernelLabels& operator=(const KernelLabels&) = delete;

  /// From now on; null: nobody, at no cost. No kernel is launched meanwhile. @param listener outlives its
  /// time.
  void tell(KernelListener* listener) noexcept;
};

}  // namespace layerstream::ops
