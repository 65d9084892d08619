#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <string>
#include <string_view>
#include <vector>

#include "core/child_process.hpp"

namespace layerstream::test {

/// How a child ended.
struct ChildResult {
  int exit_code = -1;    ///< −1 if a signal killed it
  int killed_by = 0;     ///< the signal
  std::string out, err;  ///< all it wrote
  std::size_t peak_bytes = 0;
};

/// The layerstream program as a child process. Killed if it outlives this object, or `patience`.
class Child {
 public:
  explicit Child(std::vector<std::string> arguments) : process_(command(std::move(arguments))) {}

  /// Waits until standard error holds `text`; false if the child ends before.
  bool wait_for(std::string_view text) {
    while (result_.err.find(text) == std::string::npos) {
      if (!read_some()) return false;
    }
    return true;
  }

  /// Lets it run for a while, or to its end.
  void read_for(std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end && read_some(std::chrono::milliseconds(5))) {
    }
  }

  void signal(int number) { process_.signal(number); }

  ChildResult finish() {
    while (read_some()) {
    }
    const ChildExit end = process_.wait();
    result_.exit_code = end.code;
    result_.killed_by = end.signal;
    result_.peak_bytes = end.peak_bytes;
    return result_;
  }

 private:
  static constexpr std::chrono::seconds patience{120};

  static std::vector<std::string> command(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), LAYERSTREAM_PROGRAM);
    return arguments;
  }

  /// Takes what the child has written; false once it has closed both pipes.
  bool read_some(std::chrono::milliseconds wait = std::chrono::seconds(1)) {
    if (std::chrono::steady_clock::now() > deadline_) {
      ADD_FAILURE() << "the program took too long; it said:\n" << result_.err;
      process_.signal(SIGKILL);
      return false;
    }
    return process_.read_some(wait, [&](ChildProcess::Stream stream, std::string_view bytes) {
      (stream == ChildProcess::Stream::out ? result_.out : result_.err).append(bytes);
    });
  }

  ChildProcess process_;
  ChildResult result_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::now() + patience;
};

/// Runs the program to its end.
inline ChildResult run_program(std::vector<std::string> arguments) {
  return Child(std::move(arguments)).finish();
}

}  // namespace layerstream::test
