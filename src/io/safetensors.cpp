#include "io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.hpp"

namespace layerstream::io {

namespace {

constexpr std::string_view lfs_mark = "version https://git-lfs";
constexpr std::uint64_t length_bytes = 8;

/// The header's text. Throws FileError if the file cannot hold one.
std::string read_header(const FileSource& source) {
  const std::string file = source.path().string();
  std::array<char, lfs_mark.size()> start{};
  const std::size_t start_bytes = std::min<std::uint64_t>(source.size(), start.size());
  source.read(0, std::as_writable_bytes(std::span(start).first(start_bytes)));
  if (std::string_view(start.data(), start_bytes) == lfs_mark) {
    throw FileError(
        fmt::format("{}: is a Git LFS pointer, not the data; run `git lfs pull` in its repository", file));
  }
  if (source.size() < length_bytes) {
    throw FileError(
        fmt::format("{}: too short for a safetensors file: {} bytes, the header length alone takes {}", file,
                    source.size(), length_bytes));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < length_bytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(start[i])} << (8 * i);
  }
  if (length > SafetensorsHeader::max_bytes) {
    throw FileError(fmt::format(
        "{}: header length {} is above the format's limit of {} bytes; is this a safetensors file?", file,
        length, SafetensorsHeader::max_bytes));
  }
  if (length > source.size() - length_bytes) {
    throw FileError(fmt::format(
        "{}: header length {} reaches beyond the file of {} bytes: it was cut off, fetch it again", file,
        length, source.size()));
  }
  std::string text(length, '\0');
  source.read(length_bytes, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, PageCache cache) : source_(path, cache) {
  const std::string text = read_header(source_);
  data_begin_ = length_bytes + text.size();
  header_ = parse_safetensors_header(text, source_.size() - data_begin_, path.string());
  by_name_.reserve(header_.entries.size());
  for (std::size_t i = 0; i < header_.entries.size(); ++i) by_name_.emplace(header_.entries[i].name, i);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.entries[found->second];
}

void SafetensorsFile::read(const TensorEntry& entry, std::uint64_t byte_offset,
                           std::span<std::byte> out) const {
  LAYERSTREAM_EXPECT(entry.file == source_.path().string(), "tensor {} is in {}, not in {}",
                     in_quotes(entry.name), entry.file, source_.path().string());
  LAYERSTREAM_EXPECT(byte_offset <= entry.bytes() && out.size() <= entry.bytes() - byte_offset,
                     "bytes [{}, {}) of tensor {} of {}, which has {}", byte_offset, byte_offset + out.size(),
                     in_quotes(entry.name), entry.file, entry.bytes());
  try {
    source_.read(data_begin_ + entry.begin + byte_offset, out);
  } catch (const FileError& error) {
    throw FileError(fmt::format("tensor {}: {}", in_quotes(entry.name), error.what()));
  }
}

SafetensorsWriter::SafetensorsWriter(std::shared_ptr<FileSystem> files, const std::filesystem::path& path,
                                     const std::vector<TensorSpec>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : sink_(std::move(files), path), entries_(lay_out_safetensors(tensors, path.string())) {
  const std::string header = format_safetensors_header(entries_, metadata);
  sink_.reserve(header.size() + data_bytes());
  sink_.append(header);
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  LAYERSTREAM_EXPECT(bytes.size() <= data_bytes() - written_, "{} bytes more for {}, which lacks {}",
                     bytes.size(), sink_.path().string(), data_bytes() - written_);
  sink_.append(bytes);
  written_ += bytes.size();
  while (current_ < entries_.size() && entries_[current_].end <= written_) ++current_;
}

void SafetensorsWriter::append(std::string_view name, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  // Entries without bytes are complete as soon as their turn comes.
  while (current_ < entries_.size() && entries_[current_].end <= written_) ++current_;
  LAYERSTREAM_EXPECT(current_ < entries_.size() && entries_[current_].name == name,
                     "{}: tensor {} comes, it is the turn of {}", sink_.path().string(), in_quotes(name),
                     current_ < entries_.size() ? in_quotes(entries_[current_].name) : "none");
  LAYERSTREAM_EXPECT(bytes.size() <= entries_[current_].end - written_,
                     "{}: tensor {}: {} bytes more, it lacks {}", sink_.path().string(), in_quotes(name),
                     bytes.size(), entries_[current_].end - written_);
  append(bytes);
}

void SafetensorsWriter::finish() {
  while (current_ < entries_.size() && entries_[current_].end <= written_) ++current_;
  LAYERSTREAM_EXPECT(written_ == data_bytes(), "{}: tensor {} has {} of its {} bytes", sink_.path().string(),
                     in_quotes(entries_[current_].name), written_ - entries_[current_].begin,
                     entries_[current_].bytes());
  sink_.finish();
}

}  // namespace layerstream::io
