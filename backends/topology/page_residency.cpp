#include "backends/topology/page_residency.hpp"

#include <fmt/format.h>
#include <numaif.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/ledger.hpp"

namespace layerstream {
namespace {

int move_no_pages(std::span<void*> pages, std::span<int> status) {
  return ::move_pages(0, pages.size(), pages.data(), nullptr, status.data(), 0) == 0 ? 0 : errno;
}

}  // namespace

std::size_t PageResidency::bytes_on(int node) const {
  const auto at = pages_by_node.find(node);
  if (at == pages_by_node.end() || sampled == 0) return 0;
  return static_cast<std::size_t>(static_cast<double>(bytes) * static_cast<double>(at->second) /
                                  static_cast<double>(sampled));
}

double PageResidency::share_elsewhere(int node) const {
  if (sampled == 0) return 0.0;
  std::size_t elsewhere = 0;
  for (const auto& [where, pages] : pages_by_node) elsewhere += where == node ? 0 : pages;
  return static_cast<double>(elsewhere) / static_cast<double>(sampled);
}

std::string PageResidency::to_text() const {
  if (!known()) return unavailable.empty() ? "no pages" : unavailable;
  std::string shares;
  const auto add = [&](std::size_t pages, const std::string& where) {
    shares += fmt::format("{}{:.4g}% {}", shares.empty() ? "" : ", ",
                          100.0 * static_cast<double>(pages) / static_cast<double>(sampled), where);
  };
  for (const auto& [node, pages] : pages_by_node) add(pages, fmt::format("on node {}", node));
  if (absent > 0) add(absent, "not in memory");
  return fmt::format("{}: {} ({} pages asked)", format_bytes(bytes), shares, sampled);
}

PageResidency sample_residency(const void* data, std::size_t bytes, std::size_t most_pages,
                               const QueryPages& query) {
  PageResidency residency{.bytes = bytes};
  if (bytes == 0 || most_pages == 0) return residency;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(data) / page;
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(data) + bytes - 1) / page;
  const std::uintptr_t count = last - first + 1;
  const std::uintptr_t asked = std::min<std::uintptr_t>(count, most_pages);
  std::vector<void*> pages;
  for (std::uintptr_t i = 0; i < asked; ++i) {
    // i · count / asked without an overflow.
    const std::uintptr_t index = first + i * (count / asked) + i * (count % asked) / asked;
    pages.push_back(reinterpret_cast<void*>(index * page));
  }
  std::vector<int> status(pages.size(), -ENOENT);
  const int refused = query ? query(pages, status) : move_no_pages(pages, status);
  if (refused != 0) {
    residency.unavailable =
        fmt::format("where pages lie cannot be asked (move_pages: {}{})", std::strerror(refused),
                    refused == EPERM || refused == ENOSYS
                        ? "; containers often forbid it, --security-opt seccomp=unconfined lets it"
                        : "");
    return residency;
  }
  residency.sampled = pages.size();
  for (const int where : status) {
    if (where >= 0) {
      ++residency.pages_by_node[where];
    } else {
      ++residency.absent;
    }
  }
  return residency;
}

}  // namespace layerstream
