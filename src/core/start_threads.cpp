#include "core/start_threads.hpp"

#include <system_error>

#include "core/error.hpp"

namespace layerstream {

std::vector<std::thread> start_threads(const std::vector<std::function<void()>>& bodies,
                                       const std::function<void()>& stop) {
  std::vector<std::thread> threads;
  threads.reserve(bodies.size());
  const auto end_those_that_run = [&] {
    stop();
    for (std::thread& thread : threads) thread.join();
  };
  try {
    for (const std::function<void()>& body : bodies) threads.emplace_back(body);
  } catch (const std::system_error& error) {
    end_those_that_run();
    throw ResourceError(
        fmt::format("{} of {} threads could be started ({}); lower optimizer_threads or raise the limit of "
                    "processes (ulimit -u, pids cgroup)",
                    threads.size(), bodies.size(), error.code().message()));
  } catch (...) {
    end_those_that_run();
    throw;
  }
  return threads;
}

}  // namespace layerstream
