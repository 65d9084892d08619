#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "backends/device.hpp"
#include "backends/topology/host_node.hpp"
#include "core/worker_pool.hpp"

namespace layerstream::doctor {

enum class Verdict : std::uint8_t { ok, warn, fail, not_applicable };

/// "ok", "warn", "FAIL", "not applicable".
std::string_view name_of(Verdict verdict);

/// What a check found.
struct Finding {
  Verdict verdict = Verdict::ok;
  std::string found = {};
  std::string expected = {};  ///< empty: nothing in particular
  std::string remedy = {};    ///< what to do about a warning or failure
};

/// The machine as checks see it.
struct Patient {
  Device* device = nullptr;  ///< null if there is none; checks that need one are not run then
  WorkerPool& pool;
  SystemRoots roots = {};
  NumaTopology topology = {};
  HostNode host_node = {};
  std::size_t bytes = 0;       ///< of host and of device memory that a measurement may take
  std::size_t file_bytes = 0;  ///< of a file that is written and read
  std::filesystem::path scratch = {};

  bool shares_page_tables() const {
    return device != nullptr && device->capabilities().shares_host_page_tables;
  }
  /// Not a simulated device.
  bool has_gpu() const { return device != nullptr && !device->uses_host_memory(); }
};

/// Something that can be wrong with a machine. `run` may throw, which is a failure.
struct Check {
  std::string name;
  bool needs_device = false;
  std::function<Finding(const Patient&)> run;
};

struct Outcome {
  std::string name;
  Finding finding;
  double seconds = 0.0;

  /// Name and verdict, and below what was found and expected and what to do.
  std::string to_text() const;
};

/// Runs all, one after another. @param told after each.
std::vector<Outcome> run_checks(const std::vector<Check>& checks, const Patient& patient,
                                const std::function<void(const Outcome&)>& told = {});

int count(const std::vector<Outcome>& outcomes, Verdict verdict);

/// "12 checks: 9 ok, 1 warn, 0 FAIL, 2 not applicable", and the names of those that warn or fail.
std::string summary(const std::vector<Outcome>& outcomes);

}  // namespace layerstream::doctor
