#pragma once

#include <cstddef>
#include <filesystem>

namespace layerstream::doctor {

/// A file of a given size with bytes that no file system can leave out, on the disk and out of the page
/// cache; removed with the object.
class ScratchFile {
 public:
  /// Throws FileError if it cannot be written.
  ScratchFile(const std::filesystem::path& folder, std::size_t bytes);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Its file system keeps files in memory alone (tmpfs).
  bool is_in_memory() const;
  /// Share of its pages that the page cache holds.
  double share_in_page_cache() const;

 private:
  std::filesystem::path path_;
  std::size_t bytes_;
};

}  // namespace layerstream::doctor
