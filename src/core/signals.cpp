#include "core/signals.hpp"

namespace layerstream {
namespace {

/// A signal handler is given nothing but the signal's number: the one place of the program where
/// state has to be found through a static.
std::atomic<StopRequest*> active_stop{nullptr};
static_assert(std::atomic<StopRequest*>::is_always_lock_free, "read in a signal handler");

extern "C" void layerstream_on_stop_signal(int signal_number) {
  StopRequest* stop = active_stop.load();
  if (stop != nullptr) stop->request(signal_number);
}

}  // namespace

void StopRequest::request(int signal_number) noexcept {
  int none = 0;
  signal_.compare_exchange_strong(none, signal_number);
}

std::string_view StopRequest::signal_name() const noexcept {
  switch (signal_number()) {
    case 0:
      return "";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "a signal";
  }
}

void StopRequest::throw_if_requested(std::string_view phase) const {
  if (requested()) throw Interrupted(fmt::format("stopped by {} while {}", signal_name(), phase));
}

SignalHandlers::SignalHandlers(StopRequest& stop) {
  StopRequest* none = nullptr;
  const bool alone = active_stop.compare_exchange_strong(none, &stop);
  LAYERSTREAM_EXPECT(alone, "stop signals already have a handler");
  for (std::size_t i = 0; i < signals_.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = layerstream_on_stop_signal;
    sigemptyset(&action.sa_mask);
    // Interrupted system calls restart: the flag is polled. SIGINT goes back to its default, which
    // kills, as it is delivered.
    action.sa_flags = SA_RESTART | (signals_[i] == SIGINT ? static_cast<int>(SA_RESETHAND) : 0);
    sigaction(signals_[i], &action, &former_[i]);
  }
}

SignalHandlers::~SignalHandlers() {
  for (std::size_t i = 0; i < signals_.size(); ++i) sigaction(signals_[i], &former_[i], nullptr);
  active_stop.store(nullptr);
}

}  // namespace layerstream
