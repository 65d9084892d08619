#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/config.hpp"
#include "io/file_system.hpp"

namespace layerstream {

/// The keys that a request for another placement gives, with the places they came from, over defaults: those
/// of placement, and limits of memory and threads, on none of which a bit of the result depends. Throws
/// ConfigError where no key is given, where parse_config does, and for keys that cannot be re-planned.
LoadedConfig parse_replan_request(std::string_view yaml, std::string_view source_name,
                                  std::span<const std::string> overrides = {});

/// `running` with the keys that `request` gives.
LoadedConfig with_request(LoadedConfig running, const LoadedConfig& request);

/// Where a run's output directory holds requests: waiting in replan.yaml, at last in replan.applied.yaml or
/// replan.refused.yaml.
class ReplanRequests {
 public:
  static constexpr std::string_view waiting_name = "replan.yaml";
  static constexpr std::string_view applied_name = "replan.applied.yaml";
  static constexpr std::string_view refused_name = "replan.refused.yaml";

  explicit ReplanRequests(std::filesystem::path output_dir);

  /// Leaves a request that its process finds whole or not at all, in place of one that may still wait there.
  /// @return whether there was one. Throws ConfigError where no run is, and FileError.
  bool submit(const LoadedConfig& request);

  /// Takes the request that waits, to be settled: its text; empty if it cannot be read. Asks for the file's
  /// status alone where there is none. Throws FileError if it cannot be moved away.
  std::optional<std::string> take();

  enum class Outcome : std::uint8_t { applied, refused };
  /// @pre a request was taken. Throws FileError.
  void settle(Outcome outcome);

 private:
  std::filesystem::path path(std::string_view name) const { return output_dir_ / name; }

  std::filesystem::path output_dir_;
  io::FileSystem files_;
};

}  // namespace layerstream
