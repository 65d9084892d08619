#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

namespace layerstream::test {

/// Runs this test program once more, with `environment` ("OMP_NUM_THREADS=1 ...") and only the test `test`
/// (which may be disabled), and returns the line of its output that begins with `marker`. What a program
/// decides at its start, such as the number of threads, can be varied in no other way. When there is no such
/// line or the program fails, the result says so instead.
inline std::string line_of_rerun(const std::string& environment, const std::string& test,
                                 std::string_view marker) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = fmt::format("{} '{}' --gtest_also_run_disabled_tests --gtest_filter={} 2>&1",
                                          environment, program, test);
  std::FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  std::string output;
  std::array<char, 4096> buffer{};
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  const std::size_t begin = output.find(marker);
  if (status != 0 || begin == std::string::npos) return fmt::format("status {}: {}", status, output);
  return output.substr(begin, output.find('\n', begin) - begin);
}

}  // namespace layerstream::test
