#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>

namespace layerstream {

/// Asks where pages lie: move_pages(2) without target nodes. Fills `status` with a node or a negative errno
/// for each page; returns 0, or the errno of a call that was refused.
using QueryPages = std::function<int(std::span<void*> pages, std::span<int> status)>;

/// Where the pages of some host memory lie, from a sample.
struct PageResidency {
  std::size_t bytes = 0;                          ///< of the memory
  std::size_t sampled = 0;                        ///< pages asked for
  std::map<int, std::size_t> pages_by_node = {};  ///< of those
  std::size_t absent = 0;                         ///< never touched, swapped out, or the shared zero page
  std::string unavailable = {};                   ///< why nothing is known; empty if something is

  bool known() const { return unavailable.empty() && sampled > 0; }
  /// Estimate of the bytes that lie on a node.
  std::size_t bytes_on(int node) const;
  /// Share of the sampled pages that lie on other nodes; absent pages lie nowhere.
  double share_elsewhere(int node) const;
  /// "1.00 GiB: 98.5% on node 0, 1.5% on node 1 (4096 pages asked)", or why that is not known.
  std::string to_text() const;
};

/// Asks for up to `most_pages` pages, evenly spread, without moving or touching them. Milliseconds. Never
/// throws: where the call is refused (seccomp filters of containers do) `unavailable` says so.
PageResidency sample_residency(const void* data, std::size_t bytes, std::size_t most_pages = 4096,
                               const QueryPages& query = {});

}  // namespace layerstream
