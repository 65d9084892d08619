#pragma once

#include <functional>
#include <string>

#include "backends/device.hpp"

namespace layerstream {

/// How a device pins host memory. `pin` says why it could not, or nothing if it did.
struct PinCalls {
  std::function<std::string(void* data, std::size_t bytes)> pin;
  std::function<void(void* data)> unpin;
};

/// Pins host memory piece by piece, so that progress can be told and a refusal past a limit costs the rest
/// only. A copy must not cross a piece's end: what the driver pinned in two calls is two ranges to it.
class PinnedRange final : public HostPin {
 public:
  static constexpr std::size_t default_piece = std::size_t{4} << 30;

  struct Options {
    bool required = false;  ///< throw ResourceError instead of pinning a part
    std::size_t piece_bytes = default_piece;
    std::function<void(std::size_t, std::size_t)> progress = {};
  };
  /// @param data page-aligned; memory and calls outlive this object.
  PinnedRange(void* data, std::size_t bytes, PinCalls calls, const Options& options);
  ~PinnedRange() override;
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

  std::size_t pinned_bytes() const override { return pinned_; }
  std::string shortfall() const override { return shortfall_; }

  bool contains(const void* address) const;
  /// The longest run of bytes from `address` on, inside this range, that one copy may take; and whether it is
  /// pinned. @pre contains(address)
  struct Run {
    std::size_t bytes;
    bool pinned;
  };
  Run run_from(const void* address) const;

 private:
  void unpin_all() noexcept;

  std::byte* data_;
  std::size_t bytes_;
  PinCalls calls_;
  std::size_t piece_;
  std::size_t pinned_ = 0;
  std::string shortfall_;
};

}  // namespace layerstream
