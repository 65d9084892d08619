#pragma once

#include <csignal>

#include <array>
#include <atomic>
#include <string_view>

#include "core/error.hpp"

namespace layerstream {

/// Thrown where a phase has no state worth saving; ends the program with exit_code::interrupted.
class Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& message) : Error(message, exit_code::interrupted) {}
};

/// "Please stop soon", polled between pieces of work by loading, training and evaluation. Safe to set
/// from any thread and from a signal handler.
class StopRequest {
 public:
  StopRequest() = default;
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// The first request wins. @param signal_number what asked, for messages.
  void request(int signal_number = SIGTERM) noexcept;

  bool requested() const noexcept { return signal_number() != 0; }
  /// 0 while nothing was requested.
  int signal_number() const noexcept { return signal_.load(std::memory_order_relaxed); }
  /// "SIGTERM", "SIGINT", "SIGUSR1", or "" while nothing was requested.
  std::string_view signal_name() const noexcept;

  /// Throws Interrupted naming the signal and `phase` ("loading weights") if a stop was requested.
  void throw_if_requested(std::string_view phase = "running") const;

 private:
  std::atomic<int> signal_{0};
  static_assert(std::atomic<int>::is_always_lock_free, "set from a signal handler");
};

/// While it lives, SIGTERM, SIGINT and SIGUSR1 set `stop` instead of ending the process; a second
/// SIGINT kills at once. The destructor puts the former handlers back. One at a time in a process: a
/// second one throws ContractError.
class SignalHandlers {
 public:
  explicit SignalHandlers(StopRequest& stop);
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  static constexpr std::array<int, 3> signals_{SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, signals_.size()> former_{};
};

}  // namespace layerstream
