#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream::io {

inline constexpr std::string_view temporary_suffix = ".tmp";  ///< being written, or being removed
inline constexpr std::string_view replaced_suffix = ".old";   ///< being replaced by a new one of its step

/// "checkpoint-<step><suffix>".
std::string checkpoint_name(std::int64_t step, std::string_view suffix = "");

/// The step of a directory name of exactly that form.
std::optional<std::int64_t> step_of_name(std::string_view name, std::string_view suffix = "");

/// Steps of the directories checkpoint-<step><suffix>, ascending. Throws FileError if `output_dir` exists but
/// cannot be listed.
std::vector<std::int64_t> steps_in(const std::filesystem::path& output_dir, std::string_view suffix = "");

}  // namespace layerstream::io
