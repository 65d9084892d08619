#include "doctor/scratch_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "io/file_sink.hpp"

namespace layerstream::doctor {

ScratchFile::ScratchFile(const std::filesystem::path& folder, std::size_t bytes)
    : path_(folder / fmt::format("layerstream-doctor-{}", ::getpid())), bytes_(bytes) {
  std::vector<std::uint64_t> noise((std::size_t{4} << 20) / sizeof(std::uint64_t));
  std::mt19937_64 random(1);
  std::ranges::generate(noise, random);
  io::FileSink sink(std::make_shared<io::FileSystem>(), path_);
  const std::span<const std::byte> piece = std::as_bytes(std::span(noise));
  while (sink.bytes() < bytes)
    sink.append(piece.first(std::min<std::uint64_t>(piece.size(), bytes - sink.bytes())));
  sink.finish();
}

ScratchFile::~ScratchFile() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

bool ScratchFile::is_in_memory() const {
  struct ::statfs status {};
  return ::statfs(path_.c_str(), &status) == 0 &&
         (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

double ScratchFile::share_in_page_cache() const {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0.0;
  void* const mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  if (mapped == MAP_FAILED) return 0.0;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes_ + page - 1) / page);
  const bool known = ::mincore(mapped, bytes_, pages.data()) == 0;
  ::munmap(mapped, bytes_);
  if (!known || pages.empty()) return 0.0;
  const auto held = std::ranges::count_if(pages, [](unsigned char state) { return (state & 1) != 0; });
  return static_cast<double>(held) / static_cast<double>(pages.size());
}

}  // namespace layerstream::doctor
