#include "doctor/checks.hpp"

namespace layerstream::doctor {

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  for (const auto& group : {system_checks(), device_checks(), copy_checks(), kernel_checks()}) {
    checks.insert(checks.end(), group.begin(), group.end());
  }
  return checks;
}

}  // namespace layerstream::doctor
