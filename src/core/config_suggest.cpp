#include <algorithm>
#include <numeric>

#include "core/config_schema.hpp"

namespace layerstream {
namespace {

/// Lower case, and '-' or ' ' as '_'.
std::string normal_form(std::string_view word) {
  std::string result(word);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-' || c == ' ') c = '_';
  }
  return result;
}

/// Optimal string alignment distance: insertions, deletions, substitutions and swaps of neighbours.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitution = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, substitution});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

}  // namespace

std::string_view suggest_key(const std::vector<ConfigField>& schema, std::string_view word) {
  const std::string meant = normal_form(word);
  std::string_view best;
  std::size_t best_distance = std::max<std::size_t>(2, meant.size() / 3) + 1;
  for (const ConfigField& field : schema) {
    if (std::ranges::find(field.names_elsewhere, meant) != field.names_elsewhere.end()) return field.key;
    const std::size_t distance = edit_distance(meant, field.key);
    if (distance < best_distance && distance < meant.size()) {
      best = field.key;
      best_distance = distance;
    }
  }
  if (!best.empty() || meant.size() < 5) return best;
  // A part of a long key: "accumulation" of gradient_accumulation_steps.
  for (const ConfigField& field : schema) {
    if (field.key.find(meant) != std::string_view::npos) return field.key;
  }
  return best;
}

}  // namespace layerstream
