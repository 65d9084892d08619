#pragma once

#include "core/error.hpp"
#include "core/stream.hpp"

namespace layerstream {

/// Thrown to a thread that waits for an event which will never come, because another lane failed.
class Abandoned : public Error {
 public:
  Abandoned() : Error("another lane failed") {}
};

/// A point in one lane's work that others can wait for. Owned by the executor; one lane records, any
/// number wait. Each lane has a thread that issues its operations, so waiting has two parts: the
/// issuing thread blocks until the event has been recorded, then its stream waits for the recorded work
/// (in a CPU build recorded work is already done).
class Event {
 public:
  virtual ~Event() = default;
  /// Ready to be recorded again. @pre nobody waits.
  virtual void reset() = 0;
  /// All work ordered on `stream` so far.
  virtual void record(StreamView stream) = 0;
  /// Work ordered on `stream` from now on comes after the recorded work. Throws Abandoned after `abandon`.
  virtual void wait(StreamView stream) = 0;
  /// Wakes all present and future waiters with Abandoned.
  virtual void abandon() = 0;
};

}  // namespace layerstream
