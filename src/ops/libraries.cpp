#include "ops/libraries.hpp"

namespace layerstream::ops {

/// A CPU build keeps nothing between calls.
struct Libraries::State {};

Libraries::Libraries() : state_(std::make_unique<State>()) {}
Libraries::~Libraries() = default;
void Libraries::prepare(StreamView) {}
void Libraries::set_rehearsing(StreamView, bool) {}

}  // namespace layerstream::ops
