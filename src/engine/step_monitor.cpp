#include "engine/step_monitor.hpp"

#include <fmt/format.h>

#include <utility>

#include "engine/trace.hpp"

namespace layerstream {

void ObserverGate::begin(const Schedule& schedule) {
  passing_ = open_ && observer_ != nullptr;
  if (passing_) observer_->begin(schedule);
}

void ObserverGate::before(int index, const Operation& operation) {
  if (passing_) observer_->before(index, operation);
}

void ObserverGate::after(int index, const Operation& operation) {
  if (passing_) observer_->after(index, operation);
}

void ObserverGate::failed(int index, const Operation& operation) noexcept {
  if (passing_) observer_->failed(index, operation);
}

void ObserverGate::end() noexcept {
  if (passing_) observer_->end();
}

StepMonitor::StepMonitor(Device& device, const Observers& observers, ProfileWindow window,
                         std::filesystem::path trace_directory)
    : device_(device),
      window_(window),
      trace_directory_(std::move(trace_directory)),
      times_(device),
      annotation_(observers.annotation, !window.configured()) {
  // Times innermost: what the others take is not the operation's.
  observers_.add(observers.always);
  observers_.add(&annotation_);
  observers_.add(&times_);
}

StepMonitor::~StepMonitor() {
  close_window();
}

void StepMonitor::before_step(std::int64_t step, bool wanted) {
  step_ = step;
  const bool inside = window_.contains(step);
  timed_ = wanted || inside;
  times_.set_enabled(timed_);
  if (!inside) return close_window();
  annotation_.set_open(true);
  if (!recording_) device_.set_profiled(true);
  recording_ = true;
}

StepMonitor::Seen StepMonitor::after_step(const Schedule& schedule) {
  times_.set_enabled(false);
  const bool inside = window_.contains(step_);
  if (inside && !window_.contains(step_ + 1)) close_window();
  Seen seen;
  if (!timed_ || schedule.operations.empty()) return seen;
  seen.times = times_.read();
  seen.report = make_step_report(schedule, seen.times);
  if (inside) {
    seen.trace = trace_directory_ / fmt::format("trace-step{}.json", step_);
    write_trace(*seen.trace, schedule, seen.times);
  }
  return seen;
}

void StepMonitor::close_window() noexcept {
  if (window_.configured()) annotation_.set_open(false);
  if (recording_) device_.set_profiled(false);
  recording_ = false;
}

}  // namespace layerstream
