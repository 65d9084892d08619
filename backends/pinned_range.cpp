#include "backends/pinned_range.hpp"

#include <sys/resource.h>

#include <algorithm>

#include "core/error.hpp"
#include "core/ledger.hpp"

namespace layerstream {
namespace {

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
}

}  // namespace

PinnedRange::PinnedRange(void* data, std::size_t bytes, PinCalls calls, const Options& options)
    : data_(static_cast<std::byte*>(data)),
      bytes_(bytes),
      calls_(std::move(calls)),
      piece_(options.piece_bytes) {
  try {
    while (pinned_ < bytes_) {
      const std::size_t count = std::min(piece_, bytes_ - pinned_);
      const std::string refusal = calls_.pin(data_ + pinned_, count);
      if (!refusal.empty()) {
        shortfall_ = fmt::format(
            "pinning host memory stopped after {} of {} ({}); locked-memory limit (ulimit -l): {}",
            format_bytes(pinned_), format_bytes(bytes_), refusal, memlock_limit());
        break;
      }
      pinned_ += count;
      if (options.progress) options.progress(pinned_, bytes_);
    }
    if (options.required && !shortfall_.empty()) {
      throw ResourceError(
          shortfall_ +
          "; raise the limit (ulimit -l, or --ulimit memlock=-1 for a container), or set pin_memory: "
          "auto to copy the rest through a small pinned buffer, slower");
    }
  } catch (...) {
    unpin_all();
    throw;
  }
}

PinnedRange::~PinnedRange() {
  unpin_all();
}

void PinnedRange::unpin_all() noexcept {
  for (std::size_t at = 0; at < pinned_; at += piece_) calls_.unpin(data_ + at);
  pinned_ = 0;
}

bool PinnedRange::contains(const void* address) const {
  const auto* const at = static_cast<const std::byte*>(address);
  return at >= data_ && at < data_ + bytes_;
}

PinnedRange::Run PinnedRange::run_from(const void* address) const {
  const std::size_t offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) - data_);
  if (offset >= pinned_) return {bytes_ - offset, false};
  return {std::min(piece_ - offset % piece_, pinned_ - offset), true};
}

}  // namespace layerstream
