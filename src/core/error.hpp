#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace layerstream {

/// Exit codes of the `layerstream` program.
namespace exit_code {
inline constexpr int success = 0;
inline constexpr int failure = 1;     ///< something went wrong while running
inline constexpr int refused = 2;     ///< configuration, input files or memory refused before step 0
inline constexpr int not_finite = 3;  ///< too many steps in a row with NaN or Inf
inline constexpr int interrupted =
    75;  ///< SIGTERM/SIGINT/SIGUSR1 honoured: run again; with a checkpoint if a step was done
}  // namespace exit_code

/// Base of all errors thrown by layerstream. The message says what is wrong, where (file, key, tensor,
/// line) and what to do.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, int code = exit_code::failure)
      : std::runtime_error(message), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A configuration key or value that cannot be honoured.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message) : Error(message, exit_code::refused) {}
};

/// An input file (model, data set, checkpoint) that is malformed, missing or incompatible.
class FileError : public Error {
 public:
  explicit FileError(const std::string& message) : Error(message, exit_code::refused) {}
};

/// More memory, disk or threads needed than there is.
class ResourceError : public Error {
 public:
  explicit ResourceError(const std::string& message) : Error(message, exit_code::refused) {}
};

/// A broken internal contract: always a bug of this program.
class ContractError : public Error {
 public:
  explicit ContractError(const std::string& message) : Error(message) {}
};

/// Throws ContractError with place and formatted message unless `condition` holds.
#define LAYERSTREAM_EXPECT(condition, ...)                                                           \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      throw ::layerstream::ContractError(::fmt::format("{}:{}: expected {}: {}", __FILE__, __LINE__, \
                                                       #condition, ::fmt::format(__VA_ARGS__)));     \
    }                                                                                                \
  } while (false)

}  // namespace layerstream
