#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/log.hpp"

namespace layerstream {

/// "8.4s", "3m 20s", "2h 05m", "4d 03h"; "?" for a negative or non-finite number of seconds.
std::string format_duration(double seconds);
/// Three significant digits and a power of 1000: "512", "1.2k", "34.5M".
std::string format_count(double value);

/// What one optimizer step told.
struct StepNumbers {
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  std::optional<double> mfu = {};  ///< part of the device's peak, 0 to 1
};

/// Rate and remaining time of a run of steps, over the last few of them, so that a slow first step does
/// not stay in the estimate.
class Progress {
 public:
  /// @param first_step steps done before this run. @param total_steps steps at the end of it.
  Progress(std::int64_t first_step, std::int64_t total_steps);

  void step_done(std::int64_t tokens, double seconds);

  std::int64_t steps_done() const { return done_; }
  /// 0 before the first step.
  double tokens_per_second() const;
  /// Negative before the first step.
  double remaining_seconds() const;

  /// "step 12/400  loss 2.3456  norm 1.04  lr 4.85e-05  12.3k tok/s  MFU 41.2%  ETA 3m 20s"
  std::string line(const StepNumbers& numbers) const;

 private:
  struct Step {
    std::int64_t tokens;
    double seconds;
  };
  static constexpr std::size_t window_ = 20;

  std::int64_t done_;
  std::int64_t total_;
  std::deque<Step> recent_;
};

/// While it lives, `log` is never silent for longer than `interval`: a thread of its own writes what
/// phase is going on and for how long. It writes nothing while other lines come.
class Heartbeat {
 public:
  static constexpr std::chrono::milliseconds default_interval{30'000};

  Heartbeat(Log log, std::string phase, std::chrono::milliseconds interval = default_interval);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// A new phase begins; its clock starts. Any thread.
  void set_phase(std::string phase);
  /// How much of the phase is done, in any unit; told as a percentage with the time that remains.
  void set_done(double done, double total);

 private:
  void watch();
  std::string status() const;  // with mutex_ held

  Log log_;
  std::chrono::milliseconds interval_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::string phase_;
  Log::Clock::time_point phase_start_;
  double done_ = 0;
  double total_ = 0;
  std::thread thread_;
};

}  // namespace layerstream
