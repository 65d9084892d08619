#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace layerstream::detail {

/// Parses `text` as one JSON object. `Json` is nlohmann::json or nlohmann::ordered_json. Throws FileError
/// with the place of a syntax error, and when a key stands twice in one object: readers disagree on which one
/// wins.
template <class Json>
Json parse_json_object(const std::string& text, const std::string& where);

extern template nlohmann::json parse_json_object(const std::string&, const std::string&);
extern template nlohmann::ordered_json parse_json_object(const std::string&, const std::string&);

/// Typed reading of one JSON object. A key whose value is null counts as absent; a value of the wrong type or
/// range is a FileError with file, key and value. Views the JSON, which must outlive it.
class ConfigObject {
 public:
  /// `prefix` stands before keys in messages: "" or "rope_scaling.".
  ConfigObject(const nlohmann::json& object, std::string where, std::string prefix = "")
      : object_(object), where_(std::move(where)), prefix_(std::move(prefix)) {}

  /// True when the key is there and not null.
  bool has(std::string_view key) const { return find(key) != nullptr; }
  /// True when the key is there, be it null.
  bool contains(std::string_view key) const { return object_.contains(key); }
  const nlohmann::json* find(std::string_view key) const;

  std::optional<std::int64_t> positive_integer(std::string_view key) const;
  /// The same, but absence is an error.
  std::int64_t required_positive_integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<double> positive_number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> string(std::string_view key) const;
  std::optional<std::vector<std::string>> strings(std::string_view key) const;
  std::optional<std::vector<double>> positive_numbers(std::string_view key) const;
  /// A reader of the object under `key`.
  std::optional<ConfigObject> object(std::string_view key) const;
  std::vector<std::string> keys() const;

  /// Throws FileError "<where>: <key> is <value>: <message>".
  template <class... Args>
  [[noreturn]] void refuse(std::string_view key, fmt::format_string<Args...> message, Args&&... args) const {
    throw FileError(
        fmt::format("{}: {}: {}", where_, describe(key), fmt::format(message, std::forward<Args>(args)...)));
  }

 private:
  std::string describe(std::string_view key) const;

  const nlohmann::json& object_;
  std::string where_;
  std::string prefix_;
};

}  // namespace layerstream::detail
