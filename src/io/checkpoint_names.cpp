#include "io/checkpoint_names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

#include "io/file_system.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

std::string checkpoint_name(std::int64_t step, std::string_view suffix) {
  return fmt::format("checkpoint-{}{}", step, suffix);
}

std::optional<std::int64_t> step_of_name(std::string_view name, std::string_view suffix) {
  constexpr std::string_view prefix = "checkpoint-";
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t step = -1;
  std::from_chars(name.data() + prefix.size(), name.data() + name.size(), step);
  if (step < 0 || checkpoint_name(step, suffix) != name) return std::nullopt;
  return step;
}

std::vector<std::int64_t> steps_in(const fs::path& output_dir, std::string_view suffix) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator it(output_dir, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    const std::optional<std::int64_t> step = step_of_name(it->path().filename().string(), suffix);
    if (step && it->is_directory(ignored)) steps.push_back(*step);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw system_error(output_dir, "listing the directory", error.value());
  }
  std::ranges::sort(steps);
  return steps;
}

}  // namespace layerstream::io
