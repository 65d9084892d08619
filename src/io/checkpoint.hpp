#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint_manifest.hpp"
#include "io/file_source.hpp"
#include "io/file_system.hpp"
#include "io/safetensors.hpp"

namespace layerstream::io {

/// Writes one checkpoint so that, whatever kills the process or the machine at whatever moment, the newest
/// complete checkpoint of the directory is the one before or this one:
/// all files go to `<output_dir>/checkpoint-<step>.tmp`, each made durable; then manifest.json; then the
/// directory is renamed. One writer per output directory at a time.
class CheckpointWriter {
 public:
  /// Creates the directories, after removing what interrupted saves have left. Throws FileError.
  CheckpointWriter(std::filesystem::path output_dir, std::int64_t step,
                   std::shared_ptr<FileSystem> files = std::make_shared<FileSystem>());
  /// Without commit(), removes what was written.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// A safetensors file to be filled by the caller, who calls its finish(); several may be open at once.
  /// The reference holds until this writer is gone. Arguments and errors as of SafetensorsWriter.
  SafetensorsWriter& safetensors(const std::string& name, const std::vector<TensorSpec>& tensors,
                                 const std::map<std::string, std::string>& metadata = {});

  /// A whole file of text. Throws FileError.
  void text(const std::string& name, std::string_view content);

  /// Makes the checkpoint complete and visible, in place of an older one of the same step if there is one
  /// (by exchange where the file system can, so that there is no moment without either).
  /// Throws FileError; ContractError for a safetensors file that is not finished.
  /// @return `<output_dir>/checkpoint-<step>`
  std::filesystem::path commit();

 private:
  std::filesystem::path new_file(const std::string& name);
  void put_in_place(const std::filesystem::path& final_path);

  std::shared_ptr<FileSystem> files_;
  std::filesystem::path output_dir_;
  std::filesystem::path temporary_;
  CheckpointManifest manifest_;
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;
  bool remove_temporary_ = true;
};

struct FoundCheckpoint {
  std::int64_t step;
  std::filesystem::path path;
  std::uint64_t bytes;  ///< of its files, without the manifest
};

/// The complete checkpoints (manifest and sizes are right) under `output_dir`, ascending by step; none if
/// the directory is absent. @param passed_over if given, receives why each incomplete one is not among them
std::vector<FoundCheckpoint> find_checkpoints(const std::filesystem::path& output_dir,
                                              std::vector<std::string>* passed_over = nullptr);

/// The one of the highest step.
std::optional<FoundCheckpoint> newest_complete(const std::filesystem::path& output_dir);

enum class Verify { sizes, hashes };

/// A complete checkpoint for reading.
class CheckpointReader {
 public:
  /// Checks the manifest, that each file is there and has its size; with Verify::hashes also each
  /// file's content, which reads all of it. Throws FileError naming the file.
  explicit CheckpointReader(std::filesystem::path directory, Verify verify = Verify::sizes);

  const std::filesystem::path& directory() const { return directory_; }
  std::int64_t step() const { return manifest_.step; }
  const std::vector<CheckpointFile>& files() const { return manifest_.files; }
  bool has(std::string_view name) const;

  /// Throw FileError if the checkpoint has no such file.
  std::filesystem::path path(std::string_view name) const;
  std::string text(std::string_view name) const;
  SafetensorsFile safetensors(std::string_view name, PageCache cache = PageCache::drop) const;

  /// As Verify::hashes, later. Throws FileError. @param before_file called with the number of bytes that are
  /// read already, and of all; may throw.
  void verify_hashes(
      const std::function<void(std::uint64_t done, std::uint64_t total)>& before_file = {}) const;

 private:
  std::filesystem::path directory_;
  CheckpointManifest manifest_;
};

/// Which checkpoints stay.
struct Retention {
  std::int64_t limit = 0;                 ///< so many, beside those below; 0: all
  std::optional<std::int64_t> best = {};  ///< the step of the best one
  std::int64_t major_steps = 0;           ///< all at its multiples; 0: none

  bool protects(std::int64_t step) const {
    return step == best || (major_steps > 0 && step % major_steps == 0);
  }
};

/// Removes the oldest complete checkpoints until those are left that `retention` wants; the newest complete
/// one always stays. To be called after a commit.
/// @param spare a step to keep in any case: the one just committed, which after a resume from an older
///   checkpoint need not be the highest
/// Throws FileError.
void prune(const std::filesystem::path& output_dir, const Retention& retention,
           std::optional<std::int64_t> spare = std::nullopt,
           const std::shared_ptr<FileSystem>& files = std::make_shared<FileSystem>());

/// The name in output_dir of a symbolic link to the best checkpoint.
inline constexpr const char* best_name = "checkpoint-best";

/// Lets best_name lead to the checkpoint of a step, or be absent. There is no moment with a wrong one. Throws
/// FileError, for a file system without symbolic links too.
void link_best(const std::filesystem::path& output_dir, std::optional<std::int64_t> step,
               const std::shared_ptr<FileSystem>& files = std::make_shared<FileSystem>());

/// Removes `checkpoint-<n>.tmp` of interrupted saves; gives back its name to a checkpoint that was being
/// replaced. What cannot be removed stays.
void remove_leftovers(const std::filesystem::path& output_dir, FileSystem& files);

/// Bytes that `planned_saves` more checkpoints of `checkpoint_bytes` each take at their worst moment beyond
/// what the existing ones hold, when prune(retention) follows every save: a new checkpoint is complete before
/// an old one goes, so that a limit needs room for one more. New ones that will be protected are not counted.
std::uint64_t required_bytes(const std::filesystem::path& output_dir, std::uint64_t checkpoint_bytes,
                             const Retention& retention, std::int64_t planned_saves);

/// Throws ResourceError naming have and need unless `bytes_needed` are free under `output_dir`.
void check_space(const std::filesystem::path& output_dir, std::uint64_t bytes_needed,
                 const std::shared_ptr<FileSystem>& files = std::make_shared<FileSystem>());

}  // namespace layerstream::io
