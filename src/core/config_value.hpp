#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream {

struct ConfigEntry;

/// A parsed YAML node, free of the parser's own types.
struct ConfigValue {
  enum class Kind : std::uint8_t { null, scalar, list, map };

  Kind kind = Kind::null;
  std::string text;                  ///< scalar
  std::vector<ConfigValue> items;    ///< list
  std::vector<ConfigEntry> entries;  ///< map, in the order of the file, duplicates included
};

struct ConfigEntry {
  std::string key;
  ConfigValue value;
  int line = 0;  ///< of the key, from 1
};

/// Parses one YAML document. `source_name` names it in messages. Throws ConfigError ("source:line: ...")
/// for a syntax error, several documents, a key that is not a scalar, or aliases that expand without end.
ConfigValue parse_yaml(std::string_view yaml, std::string_view source_name);

/// Readers of scalar text; nullopt when the text is not of that type. None of them trims or guesses.
/// true/false, yes/no, on/off, y/n in lower, Title and UPPER case.
std::optional<bool> parse_bool(std::string_view text);
/// Decimal integers, and decimal numbers of integral value up to 2^53 ("1e4").
std::optional<std::int64_t> parse_int(std::string_view text);
std::optional<std::uint64_t> parse_unsigned(std::string_view text);
/// Finite decimal numbers: "1e-5", "1E-5", ".5", "5.", "+2".
std::optional<double> parse_real(std::string_view text);
/// Bytes: "24GiB", "40 GB", "1.5TiB", "1073741824". Units kB MB GB TB (powers of 1000) and KiB MiB GiB
/// TiB (powers of 1024) in any case; a fraction of a byte is dropped.
std::optional<std::uint64_t> parse_bytes(std::string_view text);

/// Bytes in the largest binary unit that divides them: "24GiB", "1000".
std::string byte_size_text(std::uint64_t bytes);
/// The shortest decimal text that reads back to `value`.
std::string format_real(double value);
/// `text` as a YAML scalar: plain where that reads back as the same string, else double-quoted.
std::string format_string(std::string_view text);

}  // namespace layerstream
