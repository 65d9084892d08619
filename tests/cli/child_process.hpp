#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

extern char** environ;

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
  explicit Child(std::vector<std::string> arguments) {
    std::array<int, 2> out{};
    std::array<int, 2> err{};
    if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) {
      throw std::runtime_error("pipe2 failed");
    }
    arguments.insert(arguments.begin(), LAYERSTREAM_PROGRAM);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
    const int failure = ::posix_spawn(&pid_, LAYERSTREAM_PROGRAM, &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(out[1]);
    ::close(err[1]);
    fds_ = {out[0], err[0]};
    if (failure != 0) throw std::runtime_error("cannot start " LAYERSTREAM_PROGRAM);
  }
  ~Child() {
    for (const int fd : fds_) {
      if (fd >= 0) ::close(fd);
    }
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Waits until standard error holds `text`; false if the child ends before.
  bool wait_for(std::string_view text) {
    while (result_.err.find(text) == std::string::npos) {
      if (!read_some()) return false;
    }
    return true;
  }

  void signal(int number) { ::kill(pid_, number); }

  ChildResult finish() {
    while (read_some()) {
    }
    int status = 0;
    struct rusage usage {};
    ::wait4(pid_, &status, 0, &usage);
    pid_ = -1;
    if (WIFEXITED(status)) result_.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result_.killed_by = WTERMSIG(status);
    result_.peak_bytes = static_cast<std::size_t>(usage.ru_maxrss) * 1024;
    return result_;
  }

 private:
  static constexpr std::chrono::seconds patience{120};

  /// Takes what the child has written; false once it has closed both pipes.
  bool read_some() {
    std::array<struct pollfd, 2> waits{{{fds_[0], POLLIN, 0}, {fds_[1], POLLIN, 0}}};
    if (fds_[0] < 0 && fds_[1] < 0) return false;
    if (::poll(waits.data(), waits.size(), 1000) < 0 && errno != EINTR)
      throw std::runtime_error("poll failed");
    if (std::chrono::steady_clock::now() > deadline_) {
      ADD_FAILURE() << "the program took too long; it said:\n" << result_.err;
      ::kill(pid_, SIGKILL);
      return false;
    }
    for (std::size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents == 0) continue;
      std::array<char, 65536> buffer;
      const ssize_t count = ::read(fds_[i], buffer.data(), buffer.size());
      if (count > 0) {
        (i == 0 ? result_.out : result_.err).append(buffer.data(), static_cast<std::size_t>(count));
      } else if (count == 0) {
        ::close(fds_[i]);
        fds_[i] = -1;
      }
    }
    return true;
  }

  pid_t pid_ = -1;
  std::array<int, 2> fds_{-1, -1};
  ChildResult result_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::now() + patience;
};

/// Runs the program to its end.
inline ChildResult run_program(std::vector<std::string> arguments) {
  return Child(std::move(arguments)).finish();
}

}  // namespace layerstream::test
