#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>

#include "tests/core/fake_system.hpp"

namespace layerstream::test {

inline std::string recording(const std::string& machine) {
  const char* const data = std::getenv("LAYERSTREAM_TEST_DATA");
  if (data == nullptr)
    throw std::runtime_error("set LAYERSTREAM_TEST_DATA to <repository>/tests, as ctest does");
  const std::string path = std::string(data) + "/backends/fixtures/machines/" + machine + ".txt";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Unfolds what `tail -n +1` or record_system printed into a made-up /proc and /sys.
inline void unfold(const std::string& text, const FakeSystem& system) {
  constexpr std::string_view begin = "==> ";
  constexpr std::string_view end = " <==";
  std::istringstream lines(text);
  std::string path, content;
  const auto write = [&] {
    // One blank line separates files; FakeSystem ends the last line itself.
    if (content.ends_with("\n\n")) content.pop_back();
    if (content.ends_with('\n')) content.pop_back();
    if (!path.empty()) system.write("/" + path, content);
    content.clear();
  };
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(begin) && line.ends_with(end)) {
      write();
      path = line.substr(begin.size(), line.size() - begin.size() - end.size());
    } else {
      content += line + '\n';
    }
  }
  write();
}

/// A machine of tests/backends/fixtures.
class RecordedSystem : public FakeSystem {
 public:
  explicit RecordedSystem(const std::string& machine) { unfold(recording(machine), *this); }
};

}  // namespace layerstream::test
