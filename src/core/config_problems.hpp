#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace layerstream {

/// Everything that is wrong with a configuration, told in one error.
class ConfigProblems {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    problems_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  /// Throws ConfigError if there is any; `subject` heads the list where there are several.
  void throw_if_any(std::string_view subject) const {
    if (problems_.empty()) return;
    if (problems_.size() == 1) throw ConfigError(problems_.front());
    std::string message = fmt::format("{}: {} problems", subject, problems_.size());
    for (const std::string& problem : problems_) message += "\n  " + problem;
    throw ConfigError(message);
  }

 private:
  std::vector<std::string> problems_;
};

}  // namespace layerstream
