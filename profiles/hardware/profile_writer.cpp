#include <fmt/format.h>

#include "core/config_value.hpp"
#include "profiles/hardware/hardware_profile.hpp"
#include "profiles/hardware/profile_schema.hpp"

namespace layerstream {
namespace {

/// Four digits: no measurement has more.
std::string number_text(double value) {
  return format_real(std::stod(fmt::format("{:.4g}", value)));
}

std::string rate_text(const Rate& rate, const RateBounds& bounds) {
  const bool exact = bounds.unit == memory_bytes.unit;
  return fmt::format("value: {}, source: {}", exact ? format_real(rate.value) : number_text(rate.value),
                     format_string(rate.source));
}

/// A key's line, and what follows it.
struct Writer {
  HardwareProfile& profile;
  std::string_view indent;
  std::string_view key;

  std::string operator()(ProfileKey::Text target) const {
    return fmt::format("{}{}: {}\n", indent, key, format_string(*target(profile)));
  }
  std::string operator()(ProfileKey::Flag target) const {
    return fmt::format("{}{}: {}\n", indent, key, *target(profile));
  }
  std::string operator()(const ProfileKey::Number& number) const {
    return fmt::format("{}{}: {{{}}}\n", indent, key, rate_text(*number.target(profile), number.bounds));
  }
  std::string operator()(const ProfileKey::Curve& curve) const {
    std::string text = fmt::format("{}{}:\n", indent, key);
    for (const RateCurve::Point& point : curve.target(profile)->points()) {
      text += fmt::format("{}  - {{{}: {}, {}}}\n", indent, curve.size_key, format_real(point.at),
                          rate_text(point.rate, curve.bounds));
    }
    return text;
  }
};

}  // namespace

std::string to_yaml(const HardwareProfile& profile, std::string_view comment) {
  std::string text;
  while (!comment.empty()) {
    const std::size_t end = comment.find('\n');
    text += fmt::format("# {}\n", comment.substr(0, end));
    comment = end == std::string_view::npos ? std::string_view{} : comment.substr(end + 1);
  }
  HardwareProfile copy = profile;
  std::string_view section;
  for (const ProfileKey& key : profile_schema()) {
    if (key.section != section) text += fmt::format("\n{}:\n", key.section);
    section = key.section;
    text += std::visit(Writer{copy, section.empty() ? "" : "  ", key.key}, key.holds);
  }
  return text;
}

}  // namespace layerstream
