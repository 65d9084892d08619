#pragma once

namespace layerstream {

/// A non-owning handle of the queue on which device work is ordered.
///
/// In a CPU build the device is simulated: work runs on the calling thread, in call order, and is done
/// when the call returns; the only stream is `StreamView::host()`. In a CUDA build the view carries a
/// cudaStream_t, and calls return before the work is done. There is no default stream: the view cannot
/// be made from 0 or nullptr.
class StreamView {
 public:
  StreamView() = delete;
  StreamView(int) = delete;
  StreamView(decltype(nullptr)) = delete;
  explicit StreamView(void* native) : native_(native) {}

  static StreamView host() { return StreamView(static_cast<void*>(nullptr)); }

  void* native() const { return native_; }

 private:
  void* native_;
};

}  // namespace layerstream
