// The checkpoints of an output directory: finding, pruning, room for more.
#include <algorithm>
#include <cerrno>
#include <deque>
#include <set>
#include <system_error>

#include "core/error.hpp"
#include "core/ledger.hpp"
#include "io/checkpoint.hpp"
#include "io/checkpoint_names.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

std::vector<FoundCheckpoint> find_checkpoints(const fs::path& output_dir,
                                              std::vector<std::string>* passed_over) {
  std::vector<FoundCheckpoint> found;
  std::set<std::int64_t> seen;
  const auto consider = [&](std::int64_t step, const fs::path& path) {
    try {
      const CheckpointReader reader(path);
      if (reader.step() != step) {
        throw FileError(
            fmt::format("{}: its manifest says step {}; was it renamed?", path.string(), reader.step()));
      }
      std::uint64_t bytes = 0;
      for (const CheckpointFile& file : reader.files()) bytes += file.bytes;
      found.push_back({step, path, bytes});
    } catch (const FileError& error) {
      if (passed_over != nullptr) passed_over->push_back(error.what());
    }
  };
  for (const std::int64_t step : steps_in(output_dir)) {
    seen.insert(step);
    consider(step, output_dir / checkpoint_name(step));
  }
  // A replacement that was interrupted between its two renames.
  for (const std::int64_t step : steps_in(output_dir, replaced_suffix)) {
    if (!seen.contains(step)) consider(step, output_dir / checkpoint_name(step, replaced_suffix));
  }
  std::ranges::sort(found, {}, &FoundCheckpoint::step);
  return found;
}

std::optional<FoundCheckpoint> newest_complete(const fs::path& output_dir) {
  std::vector<FoundCheckpoint> found = find_checkpoints(output_dir);
  if (found.empty()) return std::nullopt;
  return std::move(found.back());
}

void remove_leftovers(const fs::path& output_dir, FileSystem& files) {
  for (const std::int64_t step : steps_in(output_dir, temporary_suffix)) {
    remove_tree_no_throw(files, output_dir / checkpoint_name(step, temporary_suffix));
  }
  for (const std::int64_t step : steps_in(output_dir, replaced_suffix)) {
    const fs::path replaced = output_dir / checkpoint_name(step, replaced_suffix);
    const fs::path final_path = output_dir / checkpoint_name(step);
    std::error_code ignored;
    if (fs::exists(fs::symlink_status(final_path, ignored))) {
      remove_tree_no_throw(files, replaced);
    } else {
      files.rename(replaced.c_str(), final_path.c_str());
    }
  }
}

void prune(const fs::path& output_dir, const Retention& retention, std::optional<std::int64_t> spare,
           const std::shared_ptr<FileSystem>& files) {
  LAYERSTREAM_EXPECT(retention.limit >= 0 && retention.major_steps >= 0, "limit {}, major steps {}",
                     retention.limit, retention.major_steps);
  if (retention.limit == 0) return;
  const std::vector<FoundCheckpoint> found = find_checkpoints(output_dir);
  const auto is_protected = [&](const FoundCheckpoint& checkpoint) {
    return retention.protects(checkpoint.step);
  };
  std::int64_t left = std::ssize(found) - std::ranges::count_if(found, is_protected);
  for (const FoundCheckpoint& checkpoint : found) {
    if (left <= retention.limit) break;
    if (is_protected(checkpoint)) continue;
    if (checkpoint.step == spare || checkpoint.step == found.back().step) continue;
    // Under the temporary name a removal that is interrupted leaves nothing that looks like a checkpoint.
    const fs::path doomed = output_dir / checkpoint_name(checkpoint.step, temporary_suffix);
    remove_tree(*files, doomed);
    rename(*files, checkpoint.path, doomed);
    remove_tree(*files, doomed);
    --left;
  }
}

void link_best(const fs::path& output_dir, std::optional<std::int64_t> step,
               const std::shared_ptr<FileSystem>& files) {
  const fs::path link = output_dir / best_name;
  std::error_code ignored;
  const fs::file_status there = fs::symlink_status(link, ignored);
  const bool is_ours = fs::is_symlink(there);
  if (!step) {
    if (is_ours) remove_tree(*files, link);
    return;
  }
  if (fs::exists(there) && !is_ours) {
    throw FileError(fmt::format(
        "{}: it is no symbolic link (was it copied from elsewhere?) and stays as it is; move it away",
        link.string()));
  }
  const fs::path made = link.string() + std::string(temporary_suffix);
  remove_tree(*files, made);
  if (files->symlink(checkpoint_name(*step).c_str(), made.c_str()) != 0) {
    throw system_error(made, "making a symbolic link", errno);
  }
  rename(*files, made, link);
}

std::uint64_t required_bytes(const fs::path& output_dir, std::uint64_t checkpoint_bytes,
                             const Retention& retention, std::int64_t planned_saves) {
  const std::int64_t save_total_limit = retention.limit;
  LAYERSTREAM_EXPECT(save_total_limit >= 0 && planned_saves >= 0, "limit {}, saves {}", save_total_limit,
                     planned_saves);
  if (save_total_limit == 0) return checkpoint_bytes * static_cast<std::uint64_t>(planned_saves);
  std::deque<std::uint64_t> held;  // oldest first
  for (const FoundCheckpoint& checkpoint : find_checkpoints(output_dir)) {
    if (!retention.protects(checkpoint.step)) held.push_back(checkpoint.bytes);
  }
  // After this many saves only new checkpoints are left and every further save is alike.
  const std::int64_t saves = std::min(planned_saves, save_total_limit + 1);
  std::uint64_t released = 0;
  std::uint64_t taken = 0;
  std::uint64_t worst = 0;
  for (std::int64_t i = 0; i < saves; ++i) {
    held.push_back(checkpoint_bytes);
    taken += checkpoint_bytes;
    worst = std::max(worst, taken > released ? taken - released : 0);
    while (std::ssize(held) > save_total_limit) {
      released += held.front();
      held.pop_front();
    }
  }
  return worst;
}

void check_space(const fs::path& output_dir, std::uint64_t bytes_needed,
                 const std::shared_ptr<FileSystem>& files) {
  const std::uint64_t have = free_bytes(*files, output_dir);
  if (have >= bytes_needed) return;
  throw ResourceError(
      fmt::format("{}: checkpoints need {} ({} bytes), the file system has {} ({} bytes) free; free space "
                  "there, choose another output_dir, or lower save_total_limit or the number of saves",
                  output_dir.string(), format_bytes(bytes_needed), bytes_needed, format_bytes(have), have));
}

}  // namespace layerstream::io
