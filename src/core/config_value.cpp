#include "core/config_value.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <utility>

namespace layerstream {
namespace {

constexpr double largest_exact_integer = 9007199254740992.0;  // 2^53

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

bool same_case_word(std::string_view text) {
  const auto is_lower = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto is_upper = [](char c) { return c >= 'A' && c <= 'Z'; };
  const std::string_view rest = text.substr(1);
  return std::all_of(rest.begin(), rest.end(), is_lower) || std::all_of(text.begin(), text.end(), is_upper);
}

template <class Integer>
std::optional<Integer> parse_integer(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  if (text.starts_with('+')) return std::nullopt;
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  const std::optional<double> real = parse_real(text);
  if (!real || std::abs(*real) > largest_exact_integer || *real != std::floor(*real)) return std::nullopt;
  if (std::is_unsigned_v<Integer> && *real < 0) return std::nullopt;
  return static_cast<Integer>(*real);
}

}  // namespace

std::optional<bool> parse_bool(std::string_view text) {
  if (text.empty() || !same_case_word(text)) return std::nullopt;
  const std::string word = lower(text);
  if (word == "true" || word == "yes" || word == "on" || word == "y") return true;
  if (word == "false" || word == "no" || word == "off" || word == "n") return false;
  return std::nullopt;
}

std::optional<std::int64_t> parse_int(std::string_view text) {
  return parse_integer<std::int64_t>(text);
}

std::optional<std::uint64_t> parse_unsigned(std::string_view text) {
  return parse_integer<std::uint64_t>(text);
}

std::optional<double> parse_real(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  // from_chars also takes "inf" and "nan"; a number begins with a digit or a point, after one sign.
  const std::string_view digits = text.starts_with('-') ? text.substr(1) : text;
  if (digits.empty() || !((digits[0] >= '0' && digits[0] <= '9') || digits[0] == '.')) return std::nullopt;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  static constexpr std::array<std::pair<std::string_view, std::uint64_t>, 10> units{{
      {"", 1},
      {"b", 1},
      {"kb", 1000},
      {"mb", 1000'000},
      {"gb", 1000'000'000},
      {"tb", 1000'000'000'000},
      {"kib", 1ull << 10},
      {"mib", 1ull << 20},
      {"gib", 1ull << 30},
      {"tib", 1ull << 40},
  }};
  std::size_t split = text.size();
  while (split > 0 && std::isalpha(static_cast<unsigned char>(text[split - 1])) != 0) --split;
  const std::string unit = lower(text.substr(split));
  std::string_view number = text.substr(0, split);
  while (number.ends_with(' ')) number.remove_suffix(1);
  const auto found =
      std::find_if(units.begin(), units.end(), [&](const auto& entry) { return entry.first == unit; });
  if (found == units.end()) return std::nullopt;
  if (const auto whole = parse_unsigned(number)) {
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(*whole, found->second, &bytes)) return std::nullopt;
    return bytes;
  }
  const auto real = parse_real(number);
  if (!real || *real < 0) return std::nullopt;
  const double bytes = std::floor(*real * static_cast<double>(found->second));
  if (bytes >= 18446744073709551616.0) return std::nullopt;  // 2^64
  return static_cast<std::uint64_t>(bytes);
}

std::string byte_size_text(std::uint64_t bytes) {
  static constexpr std::array<std::pair<int, std::string_view>, 4> units{
      {{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}}};
  for (const auto& [shift, unit] : units) {
    if (bytes != 0 && (bytes & ((1ull << shift) - 1)) == 0) return fmt::format("{}{}", bytes >> shift, unit);
  }
  return fmt::format("{}", bytes);
}

std::string format_real(double value) {
  return fmt::format("{}", value);
}

std::string format_string(std::string_view text) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '/' || c == '-';
  };
  // A plain scalar that is "null", or that begins with '-' or '.', could read back as something else.
  if (!text.empty() && text[0] != '-' && std::all_of(text.begin(), text.end(), plain) &&
      lower(text) != "null" && !text.starts_with("---") && !text.starts_with("...")) {
    return std::string(text);
  }
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += fmt::format("\\x{:02X}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace layerstream
