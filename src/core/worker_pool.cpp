#include "core/worker_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "core/error.hpp"
#include "core/start_threads.hpp"

namespace layerstream {

struct WorkerPool::State {
  std::mutex mutex;
  std::condition_variable work_ready;
  std::condition_variable work_done;
  std::vector<std::thread> threads;
  const std::function<void(std::int64_t)>* task = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::uint64_t generation = 0;
  int running = 0;
  bool stopping = false;
  std::exception_ptr failure;

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work_ready.notify_all();
  }

  void drain() {
    for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        (*task)(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  }

  void work() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      work_ready.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      lock.unlock();
      drain();
      lock.lock();
      if (--running == 0) work_done.notify_all();
    }
  }
};

WorkerPool::WorkerPool(int num_threads, std::vector<int> cpus) : state_(std::make_unique<State>()) {
  LAYERSTREAM_EXPECT(num_threads >= 1, "a pool of {} threads", num_threads);
  State* const state = state_.get();
  const std::vector<std::function<void()>> workers(static_cast<std::size_t>(num_threads - 1),
                                                   [state] { state->work(); });
  state->threads = start_threads(workers, [state] { state->stop(); });
  for (std::size_t i = 0; i < state->threads.size() && !cpus.empty(); ++i) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[(i + 1) % cpus.size()], &set);
    // Pinning is a matter of speed alone: a refused mask leaves the thread where the system puts it.
    (void)pthread_setaffinity_np(state->threads[i].native_handle(), sizeof(set), &set);
  }
}

WorkerPool::~WorkerPool() {
  state_->stop();
  for (std::thread& thread : state_->threads) thread.join();
}

int WorkerPool::num_threads() const {
  return static_cast<int>(state_->threads.size()) + 1;
}

void WorkerPool::parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& task) {
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    state.task = &task;
    state.count = count;
    state.next = 0;
    state.failure = nullptr;
    state.running = static_cast<int>(state.threads.size());
    ++state.generation;
  }
  state.work_ready.notify_all();
  state.drain();
  std::unique_lock lock(state.mutex);
  state.work_done.wait(lock, [&] { return state.running == 0; });
  state.task = nullptr;
  if (state.failure) std::rethrow_exception(state.failure);
}

}  // namespace layerstream
