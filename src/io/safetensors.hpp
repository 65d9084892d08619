#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/file_sink.hpp"
#include "io/file_source.hpp"
#include "io/file_system.hpp"
#include "io/safetensors_header.hpp"

namespace layerstream::io {

/// One safetensors file for reading. Opening reads and validates the header only. Movable; reads from
/// several threads are fine.
class SafetensorsFile {
 public:
  /// Throws FileError naming the file, the tensor and the fault.
  explicit SafetensorsFile(const std::filesystem::path& path, PageCache cache = PageCache::keep);

  const std::filesystem::path& path() const { return source_.path(); }
  /// In the order of their bytes.
  const std::vector<TensorEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Null if there is none of that name.
  const TensorEntry* find(std::string_view name) const;

  /// Fills `out` with bytes [byte_offset, byte_offset + out.size()) of a tensor of this file.
  /// Throws FileError; ContractError for bytes outside the tensor.
  void read(const TensorEntry& entry, std::uint64_t byte_offset, std::span<std::byte> out) const;

 private:
  FileSource source_;
  SafetensorsHeader header_;
  std::uint64_t data_begin_;                                   ///< position of the data section
  std::unordered_map<std::string_view, std::size_t> by_name_;  ///< keys point into header_.entries
};

/// Writes one safetensors file: header first, then the data, front to back, in pieces of any size.
/// Destroyed before finish(), it leaves no file.
class SafetensorsWriter {
 public:
  /// Creates the file, reserves its space and writes the header.
  /// @param tensors in the order in which their data will come; see aligned_order
  /// @param metadata transformers wants {"format": "pt"} in a model's files
  /// Throws FileError (disk full, ...); ContractError for tensors that make no valid file.
  SafetensorsWriter(std::shared_ptr<FileSystem> files, const std::filesystem::path& path,
                    const std::vector<TensorSpec>& tensors,
                    const std::map<std::string, std::string>& metadata = {});

  const std::vector<TensorEntry>& entries() const { return entries_; }

  /// The next bytes of the data section. Throws FileError; ContractError beyond the declared end.
  void append(std::span<const std::byte> bytes);

  /// The next bytes of tensor `name`, which must be the one whose turn it is.
  void append(std::string_view name, std::span<const std::byte> bytes);

  /// Makes the file durable. Throws ContractError naming the tensor whose data is not complete; FileError.
  void finish();

  bool finished() const { return sink_.finished(); }
  const FileSink& sink() const { return sink_; }

 private:
  std::uint64_t data_bytes() const { return entries_.empty() ? 0 : entries_.back().end; }

  FileSink sink_;
  std::vector<TensorEntry> entries_;
  std::size_t current_ = 0;    ///< first entry that is not complete
  std::uint64_t written_ = 0;  ///< bytes of the data section
};

}  // namespace layerstream::io
