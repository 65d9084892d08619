#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/device.hpp"
#include "engine/schedule.hpp"

namespace layerstream {

/// Carries out single operations; called from the thread of the operation's lane.
class OperationRunner {
 public:
  virtual ~OperationRunner() = default;
  /// Asynchronous on `stream` for device lanes (but see CudaLink for host memory that is not pinned), done on
  /// return for the host lane.
  virtual void run(const Operation& operation, StreamView stream) = 0;
};

/// Sees every operation on its lane's thread: times, annotations, test delays.
class ExecutionObserver {
 public:
  virtual ~ExecutionObserver() = default;
  /// On the calling thread, before any operation; what it sees lives until the run's end.
  virtual void begin(const Schedule&) {}
  /// After the operation's dependencies, before it is issued.
  virtual void before(int index, const Operation& operation) = 0;
  virtual void after(int index, const Operation& operation) = 0;
  /// In place of `after`, when the operation or an observer of it threw; perhaps without `before`.
  virtual void failed(int, const Operation&) noexcept {}
  /// On the calling thread, when every lane is done or has been abandoned.
  virtual void end() noexcept {}
};

/// Several observers as one: in order before an operation, in reverse order after it.
class ObserverList final : public ExecutionObserver {
 public:
  /// @param observer outlives the list; null adds nothing.
  void add(ExecutionObserver* observer) {
    if (observer != nullptr) observers_.push_back(observer);
  }

  void begin(const Schedule& schedule) override;
  void before(int index, const Operation& operation) override;
  void after(int index, const Operation& operation) override;
  void failed(int index, const Operation& operation) noexcept override;
  void end() noexcept override;

 private:
  std::vector<ExecutionObserver*> observers_;
};

/// Runs schedules: a thread for each lane but compute, which is the calling thread's; dependencies
/// between lanes are events. Lanes of kernels wait for them on their streams, lanes of copies and the host's
/// with their threads.
class Executor {
 public:
  /// @param device outlives the executor. Throws ResourceError if the system refuses a thread.
  explicit Executor(Device& device);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs all operations; returns when every lane is done. When an operation throws, the other lanes are
  /// abandoned at their next wait, and the first error is rethrown with operation, block, chunk and lane
  /// in its message.
  void run(const Schedule& schedule, OperationRunner& runner, ExecutionObserver* observer = nullptr);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace layerstream
