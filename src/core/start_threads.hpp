#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace layerstream {

/// A thread for each of the bodies, or none: if the system refuses one, calls `stop`, which must make the
/// bodies return, joins those that run, and throws ResourceError.
std::vector<std::thread> start_threads(const std::vector<std::function<void()>>& bodies,
                                       const std::function<void()>& stop);

}  // namespace layerstream
