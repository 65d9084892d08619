#include <fmt/format.h>

#include "backends/choose_backend.hpp"
#include "backends/free_memory.hpp"
#include "backends/topology/pci_link.hpp"
#include "core/ledger.hpp"
#include "doctor/checks.hpp"

namespace layerstream::doctor {
namespace {

/// By its name; the attributes say whether the module's link works as it should.
bool is_grace_module(const Device& device) {
  const std::string name = device.description();
  return name.find("GH200") != std::string::npos || name.find("GB200") != std::string::npos ||
         name.find("GB300") != std::string::npos;
}

Finding attributes(const Patient& patient) {
  const Device& device = *patient.device;
  const DeviceCapabilities capabilities = device.capabilities();
  Finding finding{.found = fmt::format(
                      "{}; shares the host's page tables: {}, reaches pageable memory: {}, host "
                      "reaches its managed memory: {}",
                      device.description(), capabilities.shares_host_page_tables,
                      capabilities.pageable_memory_access, capabilities.direct_managed_access_from_host)};
  if (capabilities.shares_host_page_tables && !capabilities.pageable_memory_access) {
    finding.verdict = Verdict::fail;
    finding.expected = "pageable memory within reach of a device that shares the host's page tables";
    finding.remedy = "the driver contradicts itself: update it, and send the output of --output";
  } else if (is_grace_module(device)) {
    finding.expected = "true, true (address translation services over NVLink-C2C)";
    if (!capabilities.shares_host_page_tables) {
      finding.verdict = Verdict::fail;
      finding.remedy =
          "the GPU of a Grace module should share the host's page tables: nvidia-smi -q should say \"Addressing "
          "Mode: ATS\"; check that the SMMU is on in the firmware and the driver is the open kernel module; a "
          "virtual machine may hide it";
    }
  }
  return finding;
}

Finding backend(const Patient& patient) {
  const BackendDecision decision =
      choose_backend(BackendChoice::automatic, false, patient.device->capabilities());
  return {.found = decision.to_text(),
          .expected = patient.has_gpu() && is_grace_module(*patient.device) ? "coherent" : "",
          .remedy = ""};
}

Finding device_memory(const Patient& patient) {
  if (!patient.has_gpu()) return {.verdict = Verdict::not_applicable, .found = "a simulated device"};
  const FreeDeviceMemory memory = free_memory_of(*patient.device);
  const std::string warning = free_memory_warning(*patient.device);
  return {.verdict = warning.empty() ? Verdict::ok : Verdict::warn,
          .found = fmt::format("{} of {} free ({:.0f}%)", format_bytes(memory.free),
                               format_bytes(memory.total), 100.0 * memory.share()),
          .expected = "at least 90%",
          .remedy = warning};
}

Finding link(const Patient& patient) {
  const std::string address = patient.device->capabilities().pci_bus_id;
  if (address.empty()) return {.verdict = Verdict::not_applicable, .found = "not a PCI device"};
  const PciLink link = read_pci_link(address, patient.roots);
  Finding finding{.found = fmt::format("{} at {}", link.description(), address)};
  for (const std::string& note : link.notes) finding.found += "; " + note;
  if (patient.shares_page_tables()) {
    finding.found += "; bulk data goes over NVLink-C2C, not over this";
    return finding;
  }
  if (link.maximum) finding.expected = link.maximum->to_text();
  for (const std::string& warning : link.warnings) {
    finding.verdict = Verdict::warn;
    finding.remedy += (finding.remedy.empty() ? "" : "; ") + warning;
  }
  return finding;
}

}  // namespace

std::vector<Check> device_checks() {
  return {{.name = "device", .needs_device = true, .run = attributes},
          {.name = "backend", .needs_device = true, .run = backend},
          {.name = "device memory", .needs_device = true, .run = device_memory},
          {.name = "link", .needs_device = true, .run = link}};
}

}  // namespace layerstream::doctor
