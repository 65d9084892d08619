#pragma once

#include <memory>

#include "core/stream.hpp"

namespace layerstream::ops {

/// What kernels need besides memory, made once and reused by every call: the execution space instance of each
/// stream and, in a CUDA build, the handles of the vendor libraries with their cached plans. A CPU build
/// needs nothing of the kind, and may leave it out of the Context.
///
/// Owned by whoever owns the streams, and destroyed before them. Calls on different streams may come from
/// different threads; calls on one stream must not.
class Libraries {
 public:
  Libraries();
  ~Libraries();
  Libraries(const Libraries&) = delete;
  Libraries& operator=(const Libraries&) = delete;

  /// Makes what kernels on `stream` need, which their first call would otherwise do: allocations among it.
  void prepare(StreamView stream);

  /// While it is on, calls on `stream` are there to prepare later ones of the same shapes: a matrix product that
  /// is met for the first time tries the library's algorithms and keeps the fastest of those with the same
  /// bits. It overwrites its operands for that. No effect in a CPU build.
  void set_rehearsing(StreamView stream, bool rehearsing);

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace layerstream::ops
