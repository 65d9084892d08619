#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config_schema.hpp"

/// The kinds of keys that a configuration has. Each makes a ConfigField.
namespace layerstream::config_field {

inline constexpr std::int64_t max_count = std::numeric_limits<std::int32_t>::max();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

struct Name {
  std::string_view section;
  std::string_view key;
  std::string_view meaning;
  std::vector<std::string_view> names_elsewhere = {};
};

inline ConfigField field(Name name, std::string allowed) {
  ConfigField result;
  result.section = name.section;
  result.key = name.key;
  result.meaning = name.meaning;
  result.allowed = std::move(allowed);
  result.names_elsewhere = std::move(name.names_elsewhere);
  result.in_range = [](const RunConfig&) { return true; };
  return result;
}

inline bool is_scalar(const ConfigValue& value) {
  return value.kind == ConfigValue::Kind::scalar;
}

template <class T>
const T& held(const T& member) {
  return member;
}
/// @pre it is given
template <class T>
const T& held(const std::optional<T>& member) {
  return *member;
}

/// Lets an optional key be null: "not given".
template <class Member>
ConfigField or_null(Member member, std::string_view null_means, ConfigField field) {
  field.allowed += fmt::format("; null for {}", null_means);
  field.assign = [member, assign = std::move(field.assign)](RunConfig& run, const ConfigValue& value) {
    if (value.kind != ConfigValue::Kind::null) return assign(run, value);
    std::invoke(member, run).reset();
    return true;
  };
  field.in_range = [member, in_range = std::move(field.in_range)](const RunConfig& run) {
    return !std::invoke(member, run) || in_range(run);
  };
  field.show = [member, show = std::move(field.show)](const RunConfig& run) {
    return std::invoke(member, run) ? show(run) : std::string("null");
  };
  return field;
}

/// Finds a member of a member.
template <class Outer, class Inner>
auto within(Outer RunConfig::*outer, Inner Outer::*inner) {
  return [ outer, inner ](auto& run) -> auto& {
    return run.*outer.*inner;
  };
}

struct IntRange {
  std::int64_t min;
  std::int64_t max = max_count;
};

/// Of these fields the member has the type of the value, or an optional one (see or_null). `Member` is a
/// pointer to it, or finds it in a RunConfig (see within).
template <class Member>
ConfigField integer(Name name, Member member, IntRange range) {
  ConfigField result =
      field(std::move(name), range.max == max_count ? fmt::format("integer >= {} and < 2^31", range.min)
                                                    : fmt::format("integer {} to {}", range.min, range.max));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_int(value.text) : std::nullopt;
    if (parsed) std::invoke(member, run) = *parsed;
    return parsed.has_value();
  };
  result.in_range = [member, range](const RunConfig& run) {
    const std::int64_t value = held(std::invoke(member, run));
    return value >= range.min && value <= range.max;
  };
  result.show = [member](const RunConfig& run) { return fmt::format("{}", held(std::invoke(member, run))); };
  return result;
}

struct RealRange {
  double min;
  bool min_included;
  double max = infinity;
  bool max_included = true;
};

inline std::string text_of(RealRange range) {
  std::string text = fmt::format("{} {}", range.min_included ? ">=" : ">", range.min);
  if (range.max != infinity) text += fmt::format(" and {} {}", range.max_included ? "<=" : "<", range.max);
  return text;
}

inline bool contains(RealRange range, double value) {
  const bool above = range.min_included ? value >= range.min : value > range.min;
  const bool below = range.max_included ? value <= range.max : value < range.max;
  return above && below && value < infinity;
}

template <class Member>
ConfigField real(Name name, Member member, RealRange range) {
  ConfigField result = field(std::move(name), "number " + text_of(range));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_real(value.text) : std::nullopt;
    if (parsed) std::invoke(member, run) = *parsed;
    return parsed.has_value();
  };
  result.in_range = [member, range](const RunConfig& run) {
    return contains(range, held(std::invoke(member, run)));
  };
  result.show = [member](const RunConfig& run) { return format_real(held(std::invoke(member, run))); };
  return result;
}

inline ConfigField boolean(Name name, bool RunConfig::*member) {
  ConfigField result = field(std::move(name), "true or false");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_bool(value.text) : std::nullopt;
    if (parsed) run.*member = *parsed;
    return parsed.has_value();
  };
  result.show = [member](const RunConfig& run) { return run.*member ? "true" : "false"; };
  return result;
}

inline ConfigField unsigned_integer(Name name, std::uint64_t RunConfig::*member) {
  ConfigField result = field(std::move(name), "integer >= 0 and < 2^64");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_unsigned(value.text) : std::nullopt;
    if (parsed) run.*member = *parsed;
    return parsed.has_value();
  };
  result.show = [member](const RunConfig& run) { return fmt::format("{}", run.*member); };
  return result;
}

/// A null is the empty text: "not given".
inline ConfigField text(Name name, std::string RunConfig::*member, std::string allowed) {
  ConfigField result = field(std::move(name), std::move(allowed));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    if (!is_scalar(value) && value.kind != ConfigValue::Kind::null) return false;
    run.*member = value.text;
    return true;
  };
  result.show = [member](const RunConfig& run) { return format_string(run.*member); };
  return result;
}

/// A list of non-empty texts; a single one stands for the list of it.
inline ConfigField text_list(Name name, std::vector<std::string> RunConfig::*member, std::string allowed) {
  ConfigField result = field(std::move(name), std::move(allowed));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    std::vector<std::string> texts;
    if (value.kind == ConfigValue::Kind::map) return false;
    if (is_scalar(value)) texts.push_back(value.text);
    for (const ConfigValue& item : value.items) {
      if (!is_scalar(item)) return false;
      texts.push_back(item.text);
    }
    run.*member = std::move(texts);
    return true;
  };
  result.in_range = [member](const RunConfig& run) {
    return std::ranges::none_of(run.*member, &std::string::empty);
  };
  result.show = [member](const RunConfig& run) {
    std::string list;
    for (const std::string& item : run.*member) list += (list.empty() ? "" : ", ") + format_string(item);
    return "[" + list + "]";
  };
  return result;
}

inline ConfigField path_list(Name name, std::vector<std::string> RunConfig::*member) {
  return text_list(std::move(name), member, "a path, or a list of paths");
}

inline ConfigField real_list(Name name, std::vector<double> RunConfig::*member, RealRange range) {
  ConfigField result = field(std::move(name), "a list of numbers, each " + text_of(range));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    std::vector<double> numbers;
    if (value.kind == ConfigValue::Kind::map) return false;
    for (const ConfigValue& item : is_scalar(value) ? std::vector{value} : value.items) {
      const auto parsed = is_scalar(item) ? parse_real(item.text) : std::nullopt;
      if (!parsed) return false;
      numbers.push_back(*parsed);
    }
    run.*member = std::move(numbers);
    return true;
  };
  result.in_range = [member, range](const RunConfig& run) {
    return std::ranges::all_of(run.*member, [&](double value) { return contains(range, value); });
  };
  result.show = [member](const RunConfig& run) {
    std::string list;
    for (const double number : run.*member) list += (list.empty() ? "" : ", ") + format_real(number);
    return "[" + list + "]";
  };
  return result;
}

inline ConfigField bytes(Name name, std::optional<std::uint64_t> RunConfig::*member) {
  ConfigField result = field(std::move(name), "bytes >= 1 such as 24GiB, \"40 GB\" or 1073741824");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_bytes(value.text) : std::nullopt;
    if (parsed) run.*member = parsed;
    return parsed.has_value();
  };
  result.in_range = [member](const RunConfig& run) { return held(run.*member) >= 1; };
  result.show = [member](const RunConfig& run) { return byte_size_text(held(run.*member)); };
  return result;
}

/// "auto", "off" or the number of a NUMA node.
inline ConfigField numa_node(Name name, std::string RunConfig::*member) {
  ConfigField result = field(std::move(name), "auto, off, or a node's number");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    if (!is_scalar(value)) return false;
    // YAML 1.1 readers write `off` as false.
    run.*member = value.text == "false" ? "off" : value.text;
    return true;
  };
  result.in_range = [member](const RunConfig& run) {
    const std::string& value = run.*member;
    if (value == "auto" || value == "off") return true;
    const auto node = parse_int(value);
    return node && *node >= 0 && *node < 1024;
  };
  result.show = [member](const RunConfig& run) { return run.*member; };
  return result;
}

template <class T, class Member>
ConfigField choice(Name name, Member member, std::vector<std::pair<std::string_view, T>> choices) {
  std::string allowed;
  for (const auto& [word, value] : choices) {
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", word);
  }
  ConfigField result = field(std::move(name), "one of " + allowed);
  result.assign = [member, choices](RunConfig& run, const ConfigValue& value) {
    for (const auto& [word, stored] : choices) {
      if (!is_scalar(value) || value.text != word) continue;
      std::invoke(member, run) = stored;
      return true;
    }
    return false;
  };
  result.in_range = [member, choices](const RunConfig& run) {
    for (const auto& [word, stored] : choices) {
      if (held(std::invoke(member, run)) == stored) return true;
    }
    return false;
  };
  result.show = [member, choices](const RunConfig& run) -> std::string {
    for (const auto& [word, stored] : choices) {
      if (held(std::invoke(member, run)) == stored) return std::string(word);
    }
    return "?";
  };
  return result;
}

}  // namespace layerstream::config_field
