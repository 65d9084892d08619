#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace layerstream::test {

/// What the injection stub has seen of NVTX; a tool such as Nsight Systems would see the same.
struct NvtxRange {
  std::string domain;
  std::string name;
  std::string category;
  std::string thread;  ///< as named when the range began
  std::map<std::string, double> payload;
  bool registered = false;  ///< the name is a registered string: one copy for all ranges
  bool closed = false;
};

/// Since the last call; ranges in the order in which they began.
std::vector<NvtxRange> take_nvtx_ranges();
/// Ranges that were ended on a thread with none open.
int nvtx_surplus_pops();

}  // namespace layerstream::test
