#include "doctor/residency.hpp"

#include <fmt/format.h>

namespace layerstream::doctor {

Finding judge_residency(const ResidencyChange& change) {
  constexpr double tolerated = 0.01;
  const bool known = change.before.known() && change.after.known();
  Finding finding{.found = !change.before.known() ? change.before.to_text()
                                                  : fmt::format("{}; after {}: {}", change.before.to_text(),
                                                                change.use, change.after.to_text())};
  if (change.node) finding.expected = fmt::format("all on node {}, before and after", *change.node);
  if (!change.shortfall.empty()) {
    finding.verdict = Verdict::warn;
    finding.remedy = fmt::format(
        "runs go on without being bound ({}); in a container, --cap-add SYS_NICE lets memory be bound",
        change.shortfall);
  } else if (!known) {
    finding.verdict = change.node ? Verdict::warn : Verdict::not_applicable;
    if (change.node) {
      finding.remedy =
          "runs go on, and cannot verify where their memory lies; in a container, --security-opt "
          "seccomp=unconfined lets it be asked";
    }
  } else if (!change.node) {
    return finding;
  } else if (change.before.share_elsewhere(*change.node) > tolerated) {
    finding.verdict = Verdict::fail;
    finding.remedy = "memory policy is not followed: report this kernel and driver with --output";
  } else if (change.after.share_elsewhere(*change.node) > tolerated) {
    finding.verdict = Verdict::fail;
    finding.remedy = change.remedy_for_moved;
  }
  return finding;
}

}  // namespace layerstream::doctor
