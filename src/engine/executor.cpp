#include "engine/executor.hpp"

#include <array>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/start_threads.hpp"

namespace layerstream {
namespace {

constexpr std::size_t num_lanes = all_lanes.size();
constexpr std::size_t index_of(Lane lane) {
  return static_cast<std::size_t>(lane);
}

std::string place_of(const Schedule& schedule, const Operation& operation) {
  std::string place = fmt::format("{} on lane {}", name_of(operation.kind), name_of(operation.lane));
  if (schedule.step > 0) place = fmt::format("step {}, {}", schedule.step, place);
  if (operation.block >= 0) place += fmt::format(", block {}", operation.block);
  if (operation.chunk >= 0) place += fmt::format(", chunk {}", operation.chunk);
  if (operation.piece >= 0) place += fmt::format(", piece {}", operation.piece);
  return place;
}

/// Copies of one direction leave the device in the order in which they were issued, whatever their streams:
/// one that still waits for a kernel would hold back all that come after it. So a lane of copies waits with
/// its thread, and issues a copy when it can run.
constexpr bool is_copy_lane(Lane lane) {
  return lane == Lane::h2d || lane == Lane::d2h || lane == Lane::update_out;
}

/// What the lanes of one run share.
struct Run {
  const Schedule& schedule;
  OperationRunner& runner;
  ExecutionObserver* observer;
  std::array<std::vector<int>, num_lanes> operations;  ///< indices by lane, in order
};

}  // namespace

struct Executor::State {
  explicit State(Device& device_) : device(device_) {}

  Device& device;
  std::vector<std::unique_ptr<Event>> events;  ///< by operation
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> threads;
  Run* run = nullptr;  ///< null between runs
  std::uint64_t generation = 0;
  int busy_lanes = 0;
  bool stopping = false;
  std::exception_ptr failure;

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
  }

  /// Keeps the first error, with the operation's place, and wakes all lanes.
  void fail(int index, const char* message, int code) {
    const std::string place =
        place_of(run->schedule, run->schedule.operations[static_cast<std::size_t>(index)]);
    {
      const std::lock_guard lock(mutex);
      if (failure) return;
      failure = std::make_exception_ptr(Error(fmt::format("{}: {}", place, message), code));
    }
    for (const auto& event : events) event->abandon();
  }

  static void run_observed(Run& current, int index, StreamView stream) {
    const Operation& operation = current.schedule.operations[static_cast<std::size_t>(index)];
    try {
      current.observer->before(index, operation);
      current.runner.run(operation, stream);
      current.observer->after(index, operation);
    } catch (...) {
      current.observer->failed(index, operation);
      throw;
    }
  }

  void issue(Run& current, int index, StreamView stream) {
    const Operation& operation = current.schedule.operations[static_cast<std::size_t>(index)];
    const StreamView waiting = is_copy_lane(operation.lane) ? StreamView::host() : stream;
    for (const int dependency : operation.dependencies)
      events[static_cast<std::size_t>(dependency)]->wait(waiting);
    if (current.observer == nullptr) {
      current.runner.run(operation, stream);
    } else {
      run_observed(current, index, stream);
    }
    events[static_cast<std::size_t>(index)]->record(stream);
  }

  void run_lane(Lane lane) {
    Run& current = *run;
    for (const int index : current.operations[index_of(lane)]) {
      {
        const std::lock_guard lock(mutex);
        if (failure) return;
      }
      try {
        issue(current, index, device.stream(lane));
      } catch (const Abandoned&) {
        return;
      } catch (const Error& error) {
        return fail(index, error.what(), error.code());
      } catch (const std::exception& error) {
        return fail(index, error.what(), exit_code::failure);
      } catch (...) {
        return fail(index, "unknown exception", exit_code::failure);
      }
    }
  }

  void lane_thread(Lane lane) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      lock.unlock();
      run_lane(lane);
      lock.lock();
      --busy_lanes;
      changed.notify_all();
    }
  }
};

Executor::Executor(Device& device) : state_(std::make_unique<State>(device)) {
  State* const state = state_.get();
  std::vector<std::function<void()>> lanes;
  for (const Lane lane : all_lanes) {
    if (lane != Lane::compute) lanes.emplace_back([state, lane] { state->lane_thread(lane); });
  }
  state->threads = start_threads(lanes, [state] { state->stop(); });
}

Executor::~Executor() {
  state_->stop();
  for (std::thread& thread : state_->threads) thread.join();
}

void Executor::run(const Schedule& schedule, OperationRunner& runner, ExecutionObserver* observer) {
  State& state = *state_;
  Run current{.schedule = schedule, .runner = runner, .observer = observer, .operations = {}};
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    current.operations[index_of(schedule.operations[i].lane)].push_back(static_cast<int>(i));
  }
  while (state.events.size() < schedule.operations.size()) state.events.push_back(state.device.make_event());
  for (const auto& event : state.events) event->reset();
  if (observer != nullptr) observer->begin(schedule);
  {
    const std::lock_guard lock(state.mutex);
    state.run = &current;
    state.failure = nullptr;
    state.busy_lanes = static_cast<int>(state.threads.size());
    ++state.generation;
  }
  state.changed.notify_all();
  state.run_lane(Lane::compute);
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.busy_lanes == 0; });
  state.run = nullptr;
  // Nothing may still be running when buffers go; but the first error is the one to tell.
  try {
    state.device.synchronize();
  } catch (...) {
    if (!state.failure) state.failure = std::current_exception();
  }
  if (observer != nullptr) observer->end();
  if (!state.failure) return;
  // What is torn down on the way to whoever would tell may call a lost device and end the program.
  if (state.device.is_lost()) {
    try {
      std::rethrow_exception(state.failure);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "layerstream: the device is lost: %s\n", error.what());
    }
  }
  std::rethrow_exception(state.failure);
}

void ObserverList::begin(const Schedule& schedule) {
  for (ExecutionObserver* const observer : observers_) observer->begin(schedule);
}

void ObserverList::before(int index, const Operation& operation) {
  for (ExecutionObserver* const observer : observers_) observer->before(index, operation);
}

void ObserverList::after(int index, const Operation& operation) {
  for (std::size_t i = observers_.size(); i-- > 0;) observers_[i]->after(index, operation);
}

void ObserverList::failed(int index, const Operation& operation) noexcept {
  for (std::size_t i = observers_.size(); i-- > 0;) observers_[i]->failed(index, operation);
}

void ObserverList::end() noexcept {
  for (std::size_t i = observers_.size(); i-- > 0;) observers_[i]->end();
}

}  // namespace layerstream
