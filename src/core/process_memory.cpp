#include "core/process_memory.hpp"

#include <fstream>
#include <string>
#include <string_view>

namespace layerstream {

ProcessMemory ProcessMemory::now() {
  ProcessMemory memory;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    const auto value_of = [&](std::string_view name, std::size_t& bytes) {
      if (line.starts_with(name)) bytes = std::stoull(line.substr(name.size())) * 1024;
    };
    value_of("VmRSS:", memory.resident);
    value_of("VmHWM:", memory.peak);
  }
  return memory;
}

}  // namespace layerstream
