#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "backends/device.hpp"
#include "engine/executor.hpp"
#include "engine/operation_times.hpp"
#include "engine/step_report.hpp"

namespace layerstream {

/// Which steps of a run a profiler records and a trace is written of.
struct ProfileWindow {
  std::int64_t first_step = 0;  ///< counted from 1
  std::int64_t num_steps = 0;   ///< 0: no window

  bool configured() const { return num_steps > 0; }
  bool contains(std::int64_t step) const { return step >= first_step && step - first_step < num_steps; }
};

/// Passes everything on while it is open; opening and closing take effect with the next run of operations.
class ObserverGate final : public ExecutionObserver {
 public:
  /// @param observer outlives the gate; null is allowed.
  ObserverGate(ExecutionObserver* observer, bool open) : observer_(observer), open_(open) {}
  void set_open(bool open) { open_ = open; }

  void begin(const Schedule& schedule) override;
  void before(int index, const Operation& operation) override;
  void after(int index, const Operation& operation) override;
  void failed(int index, const Operation& operation) noexcept override;
  void end() noexcept override;

 private:
  ExecutionObserver* observer_;
  bool open_;
  bool passing_ = false;  ///< in this run of operations
};

/// What a trainer sees of its steps: reports of those that it asks for, and the profile window, in which the
/// device is told to be recorded (nsys: -c cudaProfilerApi), annotation is on and each step leaves a trace.
class StepMonitor {
 public:
  struct Observers {
    ExecutionObserver* always = nullptr;      ///< sees all operations
    ExecutionObserver* annotation = nullptr;  ///< sees those of the window, or all if no window is configured
  };
  /// @param device and observers outlive the monitor. @param trace_directory exists when a step of the window
  /// ends.
  StepMonitor(Device& device, const Observers& observers, ProfileWindow window,
              std::filesystem::path trace_directory);
  /// Closes the window.
  ~StepMonitor();
  StepMonitor(const StepMonitor&) = delete;
  StepMonitor& operator=(const StepMonitor&) = delete;

  /// For the engine; outlived by the monitor.
  ExecutionObserver& observer() { return observers_; }

  /// @param step that comes next, counted from 1. @param wanted it is to be reported.
  void before_step(std::int64_t step, bool wanted);
  struct Seen {
    std::optional<StepReport> report;            ///< if it was wanted, or in the window
    std::vector<OperationTime> times;            ///< what the report was made of, by operation
    std::optional<std::filesystem::path> trace;  ///< of a step of the window
  };
  /// After a step that ran without an exception. @param schedule of it; empty if nothing ran. Throws
  /// FileError if the trace cannot be written; the window goes on.
  Seen after_step(const Schedule& schedule);
  /// Ends the window, wherever the run stands. Harmless outside it.
  void close_window() noexcept;

 private:
  Device& device_;
  ProfileWindow window_;
  std::filesystem::path trace_directory_;
  OperationTimes times_;
  ObserverGate annotation_;
  ObserverList observers_;
  std::int64_t step_ = 0;
  bool timed_ = false;      ///< this step
  bool recording_ = false;  ///< the device has been told so
};

}  // namespace layerstream
