#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "core/config_problems.hpp"
#include "core/config_value.hpp"
#include "profiles/hardware/hardware_profile.hpp"
#include "profiles/hardware/profile_schema.hpp"

namespace layerstream {
namespace {

using Kind = ConfigValue::Kind;

/// A number that does not fit is told with this: most often it is a slip of units.
constexpr std::string_view rate_form = "{value: NUMBER, source: WHO SAYS SO}";

class Reader {
 public:
  explicit Reader(std::string_view source_name) : source_name_(source_name) {}

  HardwareProfile read(const ConfigValue& document) {
    if (document.kind != Kind::map) {
      throw ConfigError(
          fmt::format("{}: a hardware profile has the sections device, link and host", source_name_));
    }
    read_section("", document, 1);
    for (const std::string_view section : sections()) {
      const ConfigEntry* const entry = find(document, section);
      if (entry == nullptr) {
        problems_.add("{}: section `{}` is missing", source_name_, section);
      } else if (entry->value.kind != Kind::map) {
        problems_.add("{}: `{}` must be a map of keys", place(entry->line), section);
      } else {
        read_section(section, entry->value, entry->line);
      }
    }
    problems_.throw_if_any(source_name_);
    check_consistency(document);
    problems_.throw_if_any(source_name_);
    return std::move(profile_);
  }

 private:
  static std::vector<std::string_view> sections() {
    std::vector<std::string_view> names;
    for (const ProfileKey& key : profile_schema()) {
      if (!key.section.empty() && (names.empty() || names.back() != key.section))
        names.push_back(key.section);
    }
    return names;
  }

  std::string place(int line) const { return fmt::format("{}:{}", source_name_, line); }

  static const ConfigEntry* find(const ConfigValue& map, std::string_view key) {
    const auto found = std::ranges::find(map.entries, key, &ConfigEntry::key);
    return found == map.entries.end() ? nullptr : &*found;
  }

  /// Reports keys of `map` that are none of `known` or come twice.
  void check_keys(const ConfigValue& map, const std::vector<std::string_view>& known, std::string_view path) {
    for (auto entry = map.entries.begin(); entry != map.entries.end(); ++entry) {
      if (std::ranges::find(known, entry->key) == known.end()) {
        problems_.add("{}: unknown key `{}{}`; known here: {}", place(entry->line), path, entry->key,
                      fmt::join(known, ", "));
      }
      if (std::find_if(map.entries.begin(), entry,
                       [&](const ConfigEntry& other) { return other.key == entry->key; }) != entry) {
        problems_.add("{}: `{}{}` is given twice; keep one of them", place(entry->line), path, entry->key);
      }
    }
  }

  void read_section(std::string_view section, const ConfigValue& map, int line) {
    const std::string path = section.empty() ? "" : fmt::format("{}.", section);
    std::vector<std::string_view> known;
    if (section.empty()) known = sections();
    for (const ProfileKey& key : profile_schema()) {
      if (key.section != section) continue;
      known.push_back(key.key);
      const ConfigEntry* const entry = find(map, key.key);
      if (entry == nullptr) {
        problems_.add("{}: `{}{}` is missing; give {}", place(line), path, key.key, form_of(key));
        continue;
      }
      std::visit([&](const auto& holds) { read_key(holds, *entry, path + entry->key); }, key.holds);
    }
    check_keys(map, known, path);
  }

  static std::string form_of(const ProfileKey& key) {
    if (std::holds_alternative<ProfileKey::Text>(key.holds)) return "a text";
    if (std::holds_alternative<ProfileKey::Flag>(key.holds)) return "true or false";
    if (const auto* curve = std::get_if<ProfileKey::Curve>(&key.holds)) {
      return fmt::format("a list of {{{}: SIZE, value: NUMBER, source: WHO SAYS SO}} in {}", curve->size_key,
                         curve->bounds.unit);
    }
    return fmt::format("{} in {}", rate_form, std::get<ProfileKey::Number>(key.holds).bounds.unit);
  }

  void read_key(ProfileKey::Text target, const ConfigEntry& entry, const std::string& path) {
    if (entry.value.kind != Kind::scalar || entry.value.text.empty()) {
      problems_.add("{}: `{}` must be a text", place(entry.line), path);
      return;
    }
    *target(profile_) = entry.value.text;
  }

  void read_key(ProfileKey::Flag target, const ConfigEntry& entry, const std::string& path) {
    const std::optional<bool> flag =
        entry.value.kind == Kind::scalar ? parse_bool(entry.value.text) : std::nullopt;
    if (flag) {
      *target(profile_) = *flag;
    } else {
      problems_.add("{}: `{}` must be true or false", place(entry.line), path);
    }
  }

  void read_key(const ProfileKey::Number& number, const ConfigEntry& entry, const std::string& path) {
    *number.target(profile_) = read_rate(entry.value, entry.line, path, number.bounds, {});
  }

  void read_key(const ProfileKey::Curve& curve, const ConfigEntry& entry, const std::string& path) {
    if (entry.value.kind != Kind::list || entry.value.items.empty()) {
      problems_.add("{}: `{}` must be a list of {{{}: SIZE, value: NUMBER, source: WHO SAYS SO}}",
                    place(entry.line), path, curve.size_key);
      return;
    }
    std::vector<RateCurve::Point> points;
    for (const ConfigValue& item : entry.value.items) {
      const int line = item.entries.empty() ? entry.line : item.entries.front().line;
      const std::string item_path = fmt::format("{}[{}]", path, points.size());
      RateCurve::Point point;
      point.rate = read_rate(item, line, item_path, curve.bounds, curve.size_key);
      if (item.kind == Kind::map) point.at = read_number(item, line, item_path, curve.size_key, curve_tokens);
      if (!points.empty() && point.at <= points.back().at) {
        problems_.add("{}: `{}.{}` must be larger than the one before it", place(line), item_path,
                      curve.size_key);
      }
      points.push_back(std::move(point));
    }
    *curve.target(profile_) = RateCurve(std::move(points));
  }

  Rate read_rate(const ConfigValue& value, int line, const std::string& path, const RateBounds& bounds,
                 std::string_view size_key) {
    Rate rate;
    if (value.kind != Kind::map) {
      problems_.add("{}: `{}` must be {}, since every number says where it is from", place(line), path,
                    rate_form);
      return rate;
    }
    std::vector<std::string_view> known{"value", "source"};
    if (!size_key.empty()) known.push_back(size_key);
    check_keys(value, known, path + ".");
    rate.value = read_number(value, line, path, "value", bounds);
    const ConfigEntry* const source = find(value, "source");
    const bool has_words = source != nullptr && source->value.kind == Kind::scalar &&
                           source->value.text.find_first_not_of(" \t\n") != std::string::npos;
    if (has_words) {
      rate.source = source->value.text;
    } else {
      problems_.add(
          "{}: `{}.source` is missing or empty; say who measured or published the number, or "
          "`estimate:` and how it was made",
          place(source == nullptr ? line : source->line), path);
    }
    return rate;
  }

  /// 1 where there is none, so that checks go on.
  double read_number(const ConfigValue& map, int line, const std::string& path, std::string_view key,
                     const RateBounds& bounds) {
    const ConfigEntry* const entry = find(map, key);
    if (entry == nullptr) {
      problems_.add("{}: `{}.{}` is missing; give a number in {}", place(line), path, key, bounds.unit);
      return 1.0;
    }
    std::optional<double> number;
    if (entry->value.kind == Kind::scalar) {
      number = parse_real(entry->value.text);
      if (!number && bounds.unit == memory_bytes.unit) {
        if (const auto bytes = parse_bytes(entry->value.text)) number = static_cast<double>(*bytes);
      }
    }
    if (!number) {
      problems_.add("{}: `{}.{}` is not a finite number; give one in {}", place(entry->line), path, key,
                    bounds.unit);
      return 1.0;
    }
    if (*number < bounds.least || *number > bounds.most) {
      problems_.add(
          "{}: `{}.{}` = {} is refused: no machine has that; from {:g} to {:g} {} are allowed, so "
          "check the unit",
          place(entry->line), path, key, entry->value.text, bounds.least, bounds.most, bounds.unit);
    }
    return *number;
  }

  // --- rates that contradict each other ---

  int line_of(const ConfigValue& document, std::string_view section, std::string_view key) const {
    return find(find(document, section)->value, key)->line;
  }

  void check_consistency(const ConfigValue& document) {
    // Measurements of the same thing differ by a little.
    constexpr double tolerance = 1.1;
    const auto& link = profile_.link;
    const auto& host = profile_.host;
    const double in = link.to_device_bytes_per_second.value;
    const double out = link.to_host_bytes_per_second.value;
    const double duplex = link.duplex_bytes_per_second.value;
    if (duplex * tolerance < std::max(in, out) || duplex > tolerance * (in + out)) {
      problems_.add(
          "{}: `link.duplex_bytes_per_second` = {:g} must lie between the faster direction ({:g}) and the "
          "sum of both ({:g})",
          place(line_of(document, "link", "duplex_bytes_per_second")), duplex, std::max(in, out), in + out);
    }
    const double alone = host.adamw_parameters_per_second.value;
    if (host.adamw_beside_copies_parameters_per_second.value > tolerance * alone) {
      problems_.add("{}: `host.adamw_beside_copies_parameters_per_second` = {:g} is more than alone ({:g})",
                    place(line_of(document, "host", "adamw_beside_copies_parameters_per_second")),
                    host.adamw_beside_copies_parameters_per_second.value, alone);
    }
    if (host.copies_beside_adamw_bytes_per_second.value > tolerance * duplex) {
      problems_.add(
          "{}: `host.copies_beside_adamw_bytes_per_second` = {:g} is more than the link does alone "
          "({:g})",
          place(line_of(document, "host", "copies_beside_adamw_bytes_per_second")),
          host.copies_beside_adamw_bytes_per_second.value, duplex);
    }
  }

  std::string_view source_name_;
  HardwareProfile profile_;
  ConfigProblems problems_;
};

}  // namespace

HardwareProfile parse_hardware_profile(std::string_view yaml, std::string_view source_name) {
  return Reader(source_name).read(parse_yaml(yaml, source_name));
}

HardwareProfile load_hardware_profile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code ignored;
  if (!file || std::filesystem::is_directory(path, ignored)) {
    throw ConfigError(fmt::format(
        "{}: cannot be read; give the path of a hardware profile: one of profiles/hardware/, or what "
        "`layerstream calibrate` wrote",
        path.string()));
  }
  const std::string yaml{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return parse_hardware_profile(yaml, path.string());
}

}  // namespace layerstream
