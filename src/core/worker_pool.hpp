#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace layerstream {

/// A few threads for host work that runs beside the compute lane (optimizer, first touch, file I/O).
/// Kokkos host regions must not be entered from two threads at once, so that work never uses Kokkos.
class WorkerPool {
 public:
  /// @param num_threads at least 1; the calling thread counts as one of them.
  /// @param cpus CPUs to pin the workers to, in order; empty leaves them unpinned.
  /// Throws ResourceError if the system refuses a thread.
  explicit WorkerPool(int num_threads, std::vector<int> cpus = {});
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_threads() const;

  /// Calls task(i) once for each i in [0, count), on the caller and the workers; which thread takes
  /// which index is not defined, so tasks must be independent. Returns when all are done; rethrows the
  /// first exception. Not reentrant, one caller at a time.
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace layerstream
