#pragma once

#include <string>

#include "backends/device.hpp"
#include "core/run_config.hpp"

namespace layerstream {

/// The backend of a run, and why.
struct BackendDecision {
  BackendChoice backend = BackendChoice::explicit_copies;  ///< never automatic
  std::string reason = {};  ///< "the device shares the host's page tables (ATS)"

  bool is_coherent() const { return backend == BackendChoice::coherent; }
  /// "coherent: the device shares the host's page tables (ATS)".
  std::string to_text() const { return std::string(is_coherent() ? "coherent: " : "explicit: ") + reason; }
};

/// `auto` is coherent on a device whose kernels reach any host memory through the host's page tables,
/// explicit on others. Throws ConfigError for `coherent` on a device that does not, unless emulation is asked
/// for.
BackendDecision choose_backend(BackendChoice asked, bool allow_emulation,
                               const DeviceCapabilities& capabilities);

}  // namespace layerstream
