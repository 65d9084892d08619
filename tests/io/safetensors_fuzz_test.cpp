// Mutated files are read as a valid file or refused with a FileError: no crash, no hang, no read out of
// bounds (run this under the sanitizers, preset cpu-debug).
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "data_files.hpp"
#include "io/safetensors.hpp"

namespace layerstream::io {
namespace {

std::string valid_file() {
  std::string file =
      testing::safetensors_bytes({{"model.embed.weight", "BF16", "[3, 4]", std::string(24, 'e')},
                                  {"norm", "F32", "[4]", std::string(16, 'n')},
                                  {"empty", "F16", "[0,7]", ""},
                                  {"scalar", "F64", "[]", std::string(8, 's')},
                                  {"ids", "I64", "[2]", std::string(16, 'i')},
                                  {"mask", "BOOL", "[5]", std::string(5, '\1')}});
  return file;
}

/// The rules of the format, told apart from the parser's code: entries that break one must not come out of
/// it.
void expect_valid(const SafetensorsFile& file, std::uint64_t file_bytes, const std::string& bytes) {
  std::uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i)
    header_bytes = header_bytes << 8 | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
  std::uint64_t covered = 0;
  std::map<std::string, int> names;
  for (const TensorEntry& entry : file.entries()) {
    EXPECT_EQ(++names[entry.name], 1);
    EXPECT_EQ(entry.begin, covered);
    std::uint64_t wanted = size_of(entry.dtype);
    for (const std::int64_t extent : entry.shape) {
      EXPECT_GE(extent, 0);
      wanted *= static_cast<std::uint64_t>(extent);
    }
    EXPECT_EQ(entry.end - entry.begin, wanted);
    covered = entry.end;
    ASSERT_LE(8 + header_bytes + covered, file_bytes);
    std::vector<std::byte> data(entry.bytes());
    file.read(entry, 0, data);
    const auto expected =
        std::as_bytes(std::span(bytes)).subspan(8 + header_bytes + entry.begin, data.size());
    EXPECT_TRUE(std::ranges::equal(data, expected));
  }
  EXPECT_EQ(8 + header_bytes + covered, file_bytes);
}

/// A file in memory: thousands of rewrites would keep a disk busy.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {}
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  /// Path of the file, which now holds `bytes`.
  std::string write(const std::string& bytes) {
    if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, bytes.data(), bytes.size(), 0) != std::ssize(bytes)) {
      throw std::runtime_error("cannot write to memory");
    }
    return "/proc/self/fd/" + std::to_string(fd_);
  }

 private:
  int fd_;
};

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::string mutate(std::string bytes) {
    for (int i = below(3); i >= 0; --i) once(bytes);
    return bytes;
  }

 private:
  int below(std::size_t n) { return n == 0 ? 0 : static_cast<int>(random_() % n); }

  void once(std::string& bytes) {
    static const std::vector<std::string> tokens{"{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ",",
                                                 ":",
                                                 "\"",
                                                 "-1",
                                                 "0",
                                                 "9223372036854775807",
                                                 "18446744073709551615",
                                                 "1e9",
                                                 "null",
                                                 "\\u0000",
                                                 "\\ud800",
                                                 "\"dtype\"",
                                                 "\"shape\":[]",
                                                 "\"__metadata__\":{\"a\":\"b\"},",
                                                 "\xff",
                                                 " ",
                                                 "\n"};
    const std::size_t at = static_cast<std::size_t>(below(bytes.size()));
    if (bytes.empty()) return;
    switch (below(8)) {
      case 0:
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 2:
        bytes[at] = static_cast<char>(random_());
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4:
        bytes.erase(at, static_cast<std::size_t>(1 + below(20)));
        break;
      case 5:
        bytes.insert(at, bytes.substr(static_cast<std::size_t>(below(bytes.size())),
                                      static_cast<std::size_t>(below(40))));
        break;
      case 6:
        bytes.insert(at, tokens[static_cast<std::size_t>(below(tokens.size()))]);
        break;
      default: {  // a digit, to hit offsets and shapes
        const std::size_t digit = bytes.find_first_of("0123456789", at);
        if (digit != std::string::npos) bytes[digit] = static_cast<char>('0' + below(10));
      }
    }
    // Half of the time the header length follows, so that the mutation reaches the parser.
    const std::size_t brace = bytes.rfind('}');
    if (bytes.size() > 8 && brace != std::string::npos && brace >= 8 && below(2) == 0) {
      const std::uint64_t length = brace + 1 - 8;
      std::memcpy(bytes.data(), &length, 8);
    }
  }

  std::mt19937_64 random_;
};

TEST(SafetensorsFuzz, UnchangedFileIsValid) {
  MemoryFile memory;
  const std::string bytes = valid_file();
  const SafetensorsFile file(memory.write(bytes));
  EXPECT_EQ(file.entries().size(), 6u);
  expect_valid(file, bytes.size(), bytes);
}

TEST(SafetensorsFuzz, MutatedFilesAreValidOrRefused) {
  MemoryFile memory;
  const std::string original = valid_file();
  Mutator mutator(20240605);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 8000; ++i) {
    const std::string bytes = mutator.mutate(original);
    const std::string path = memory.write(bytes);
    try {
      const SafetensorsFile file(path);
      ++accepted;
      expect_valid(file, bytes.size(), bytes);
    } catch (const FileError& error) {
      ++refused;
      EXPECT_EQ(std::string(error.what()).find(path + ": "), 0u) << error.what();
    }
    ASSERT_FALSE(HasFailure()) << "mutation " << i;
  }
  // Both verdicts occur, or the mutations would test nothing.
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 4000);
}

TEST(SafetensorsFuzz, ChangedDataLeavesTheEntriesAsTheyWere) {
  MemoryFile memory;
  const std::string original = valid_file();
  const SafetensorsFile before(memory.write(original));
  std::mt19937_64 random(7);
  for (int i = 0; i < 200; ++i) {
    std::string bytes = original;
    bytes[bytes.size() - 1 - random() % before.entries().back().end] = static_cast<char>(random());
    const SafetensorsFile after(memory.write(bytes));
    ASSERT_EQ(after.entries().size(), before.entries().size());
    for (std::size_t e = 0; e < after.entries().size(); ++e) {
      EXPECT_EQ(after.entries()[e].name, before.entries()[e].name);
      EXPECT_EQ(after.entries()[e].begin, before.entries()[e].begin);
      EXPECT_EQ(after.entries()[e].shape, before.entries()[e].shape);
    }
  }
}

TEST(SafetensorsFuzz, EveryTruncationIsRefused) {
  MemoryFile memory;
  const std::string original = valid_file();
  for (std::size_t n = 0; n < original.size(); ++n) {
    const std::string path = memory.write(original.substr(0, n));
    EXPECT_THROW(SafetensorsFile{path}, FileError) << n;
  }
}

}  // namespace
}  // namespace layerstream::io
