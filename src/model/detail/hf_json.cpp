#include "model/detail/hf_json.hpp"

#include <cmath>
#include <set>

namespace layerstream::detail {
namespace {

/// Far above any real size, far below where products of two sizes leave 64 bits.
constexpr std::int64_t largest_size = std::int64_t{1} << 31;
constexpr std::size_t shown_value_length = 60;

}  // namespace

template <class Json>
Json parse_json_object(const std::string& text, const std::string& where) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto refuse_duplicates = [&](int /*depth*/, typename Json::parse_event_t event, Json& parsed) {
    using Event = typename Json::parse_event_t;
    if (event == Event::object_start) keys_of_open_objects.emplace_back();
    if (event == Event::object_end) keys_of_open_objects.pop_back();
    if (event == Event::key) {
      const auto key = parsed.template get<std::string>();
      if (!keys_of_open_objects.back().insert(key).second) {
        throw FileError(
            fmt::format("{}: key '{}' stands twice in one object; remove one of them", where, key));
      }
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, refuse_duplicates);
  } catch (const nlohmann::json::exception& error) {
    throw FileError(fmt::format("{}: not valid JSON: {}", where, error.what()));
  }
  if (!json.is_object())
    throw FileError(fmt::format("{}: expected a JSON object, found {}", where, json.type_name()));
  return json;
}

template nlohmann::json parse_json_object(const std::string&, const std::string&);
template nlohmann::ordered_json parse_json_object(const std::string&, const std::string&);

const nlohmann::json* ConfigObject::find(std::string_view key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::string ConfigObject::describe(std::string_view key) const {
  const auto it = object_.find(key);
  if (it == object_.end()) return fmt::format("{}{} is missing", prefix_, key);
  std::string value = it->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (value.size() > shown_value_length) value = value.substr(0, shown_value_length) + "...";
  return fmt::format("{}{} is {}", prefix_, key, value);
}

std::optional<std::int64_t> ConfigObject::positive_integer(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer()) refuse(key, "expected a positive integer");
  const bool too_large =
      value->is_number_unsigned() && value->get<std::uint64_t>() > std::uint64_t{largest_size};
  if (too_large) refuse(key, "expected a positive integer of at most {}", largest_size);
  const auto number = value->get<std::int64_t>();
  if (number <= 0) refuse(key, "expected a positive integer");
  return number;
}

std::int64_t ConfigObject::required_positive_integer(std::string_view key) const {
  const auto value = positive_integer(key);
  if (!value) refuse(key, "expected a positive integer");
  return *value;
}

std::optional<double> ConfigObject::number(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) refuse(key, "expected a number");
  return value->get<double>();
}

std::optional<double> ConfigObject::positive_number(std::string_view key) const {
  const auto value = number(key);
  if (value && !(*value > 0.0 && std::isfinite(*value))) refuse(key, "expected a positive number");
  return value;
}

std::optional<bool> ConfigObject::boolean(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "expected true or false");
  return value->get<bool>();
}

std::optional<std::string> ConfigObject::string(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(key, "expected a string");
  return value->get<std::string>();
}

std::optional<std::vector<std::string>> ConfigObject::strings(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) refuse(key, "expected a list of strings");
  std::vector<std::string> result;
  for (const nlohmann::json& item : *value) {
    if (!item.is_string()) refuse(key, "expected a list of strings");
    result.push_back(item.get<std::string>());
  }
  return result;
}

std::optional<std::vector<double>> ConfigObject::positive_numbers(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) refuse(key, "expected a list of positive numbers");
  std::vector<double> result;
  for (const nlohmann::json& item : *value) {
    if (!item.is_number() || !(item.get<double>() > 0.0)) refuse(key, "expected a list of positive numbers");
    result.push_back(item.get<double>());
  }
  return result;
}

std::optional<ConfigObject> ConfigObject::object(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) refuse(key, "expected an object");
  return ConfigObject(*value, where_, fmt::format("{}{}.", prefix_, key));
}

std::vector<std::string> ConfigObject::keys() const {
  std::vector<std::string> result;
  for (const auto& item : object_.items()) result.push_back(item.key());
  return result;
}

}  // namespace layerstream::detail
