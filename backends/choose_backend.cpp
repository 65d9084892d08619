#include "backends/choose_backend.hpp"

#include "core/error.hpp"

namespace layerstream {

BackendDecision choose_backend(BackendChoice asked, bool allow_emulation,
                               const DeviceCapabilities& capabilities) {
  if (asked != BackendChoice::explicit_copies && capabilities.shares_host_page_tables &&
      capabilities.pageable_memory_access) {
    return {BackendChoice::coherent, "the device shares the host's page tables (ATS)"};
  }
  switch (asked) {
    case BackendChoice::automatic:
      return {BackendChoice::explicit_copies, "the device does not share the host's page tables"};
    case BackendChoice::explicit_copies:
      return {BackendChoice::explicit_copies, "asked for"};
    case BackendChoice::coherent:
      if (allow_emulation) {
        return {BackendChoice::coherent, "emulated: the device does not share the host's page tables"};
      }
      throw ConfigError(
          "backend: coherent: this device does not share the host's page tables; set allow_emulation: true to "
          "emulate it, or backend: explicit");
  }
  throw ContractError("unknown backend");
}

}  // namespace layerstream
