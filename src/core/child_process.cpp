#include "core/child_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

extern char** environ;

namespace layerstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds poll_interval{200};
/// Where there is nothing to wait on: both streams closed, the process still there.
constexpr std::chrono::milliseconds end_interval{5};

[[noreturn]] void fail(int error_number, const std::string& what) {
  throw std::system_error(error_number, std::generic_category(), what);
}

class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void own(int fd) { fd_ = fd; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// What the child has of this process: one end of each pipe, nothing else.
struct Pipe {
  Descriptor read_end, write_end;

  explicit Pipe(const std::string& program) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail(errno, program);
    read_end.own(ends[0]);
    write_end.own(ends[1]);
  }
};

class SpawnSettings {
 public:
  SpawnSettings(int out, int err) {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawnattr_setflags(&attributes,
                               POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    ::posix_spawnattr_setpgroup(&attributes, 0);
    // Signals are what they are in a process that begins, whatever this one blocks or ignores.
    sigset_t signals;
    sigemptyset(&signals);
    ::posix_spawnattr_setsigmask(&attributes, &signals);
    for (const int number : {SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGPIPE, SIGCHLD}) sigaddset(&signals, number);
    ::posix_spawnattr_setsigdefault(&attributes, &signals);
  }
  ~SpawnSettings() {
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

/// Cuts both streams into lines.
class LineCutter {
 public:
  explicit LineCutter(const ChildCallbacks& callbacks) : callbacks_(callbacks) {}

  void add(ChildProcess::Stream stream, std::string_view bytes) {
    std::string& rest = rest_[static_cast<std::size_t>(stream)];
    rest.append(bytes);
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = rest.find('\n', begin)) != std::string::npos; begin = end + 1) {
      give(stream, std::string_view(rest).substr(begin, end - begin));
    }
    rest.erase(0, begin);
  }
  /// Last lines that have no end.
  void finish() {
    for (const auto stream : {ChildProcess::Stream::out, ChildProcess::Stream::err}) {
      const std::string rest = std::exchange(rest_[static_cast<std::size_t>(stream)], {});
      if (!rest.empty()) give(stream, rest);
    }
  }

 private:
  void give(ChildProcess::Stream stream, std::string_view line) {
    if (callbacks_.line) callbacks_.line(stream, line);
  }

  const ChildCallbacks& callbacks_;
  std::array<std::string, 2> rest_;
};

/// SIGTERM, and SIGKILL after the grace (from the destructor). What the child still writes is dropped.
void stop(ChildProcess& child, std::chrono::milliseconds grace) {
  const auto deadline = Clock::now() + grace;
  child.signal(SIGTERM);
  while (!child.try_wait() && Clock::now() < deadline) {
    if (!child.read_some(end_interval * 4, {})) std::this_thread::sleep_for(end_interval);
  }
  // What it started may need longer than it, and may not heed.
  while (child.has_group() && Clock::now() < deadline) std::this_thread::sleep_for(end_interval);
  child.kill_group();
}

}  // namespace

ChildProcess::ChildProcess(std::vector<std::string> command) {
  const std::string& program = command.at(0);
  std::vector<char*> arguments;
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  Pipe out(program);
  Pipe err(program);
  const SpawnSettings settings(out.write_end.get(), err.write_end.get());
  const int failure = ::posix_spawnp(&pid_, program.c_str(), &settings.actions, &settings.attributes,
                                     arguments.data(), environ);
  if (failure != 0) fail(failure, program);
  pipes_ = {out.read_end.release(), err.read_end.release()};
}

ChildProcess::~ChildProcess() {
  if (!try_wait()) {
    signal(SIGKILL);
    wait();
  }
  for (std::size_t i = 0; i < pipes_.size(); ++i) close_stream(i);
}

bool ChildProcess::read_some(std::chrono::milliseconds patience, const Sink& sink) {
  if (pipes_[0] < 0 && pipes_[1] < 0) return false;
  // poll(2) passes over negative descriptors.
  std::array<struct pollfd, 2> waits{{{pipes_[0], POLLIN, 0}, {pipes_[1], POLLIN, 0}}};
  const int ready = ::poll(waits.data(), waits.size(), static_cast<int>(patience.count()));
  if (ready <= 0) return true;
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (waits[i].revents == 0) continue;
    std::array<char, 65536> buffer;
    const ssize_t count = ::read(pipes_[i], buffer.data(), buffer.size());
    if (count > 0) {
      if (sink) sink(static_cast<Stream>(i), {buffer.data(), static_cast<std::size_t>(count)});
    } else if (count == 0 || errno != EINTR) {
      close_stream(i);
    }
  }
  return pipes_[0] >= 0 || pipes_[1] >= 0;
}

void ChildProcess::signal(int number) noexcept {
  if (!end_) ::kill(-pid_, number);
}

bool ChildProcess::has_group() const noexcept {
  return ::kill(-pid_, 0) == 0;
}

void ChildProcess::kill_group() noexcept {
  ::kill(-pid_, SIGKILL);
}

std::optional<ChildExit> ChildProcess::try_wait() noexcept {
  if (end_) return end_;
  int status = 0;
  struct rusage usage {};
  const pid_t ended = ::wait4(pid_, &status, WNOHANG, &usage);
  if (ended == pid_) {
    note_end(status, static_cast<std::size_t>(usage.ru_maxrss) * 1024);
  } else if (ended < 0 && errno != EINTR) {
    end_.emplace();  // somebody else has waited for it
  }
  return end_;
}

ChildExit ChildProcess::wait() noexcept {
  int status = 0;
  struct rusage usage {};
  while (!end_) {
    if (::wait4(pid_, &status, 0, &usage) == pid_) {
      note_end(status, static_cast<std::size_t>(usage.ru_maxrss) * 1024);
    } else if (errno != EINTR) {
      end_.emplace();  // somebody else has waited for it
    }
  }
  return *end_;
}

void ChildProcess::note_end(int status, std::size_t peak_bytes) noexcept {
  end_.emplace();
  if (WIFEXITED(status)) end_->code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end_->signal = WTERMSIG(status);
  end_->peak_bytes = peak_bytes;
}

void ChildProcess::close_stream(std::size_t stream) noexcept {
  if (pipes_[stream] >= 0) ::close(pipes_[stream]);
  pipes_[stream] = -1;
}

std::string shell_line(const std::vector<std::string>& command) {
  static constexpr std::string_view plain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  std::string line;
  for (const std::string& argument : command) {
    if (!line.empty()) line += ' ';
    if (!argument.empty() && argument.find_first_not_of(plain) == std::string::npos) {
      line += argument;
      continue;
    }
    line += '\'';
    for (const char c : argument) line += c == '\'' ? "'\\''" : std::string(1, c);
    line += '\'';
  }
  return line;
}

ChildExit run_child(std::vector<std::string> command, const ChildCallbacks& callbacks) {
  ChildProcess child(std::move(command));
  try {
    LineCutter lines(callbacks);
    const ChildProcess::Sink sink = [&](ChildProcess::Stream stream, std::string_view bytes) {
      lines.add(stream, bytes);
    };
    auto polled = Clock::now();
    const auto poll = [&] {
      if (!callbacks.poll || Clock::now() < polled + poll_interval / 2) return;
      callbacks.poll();
      polled = Clock::now();
    };
    while (!child.try_wait()) {
      if (!child.read_some(poll_interval / 2, sink)) std::this_thread::sleep_for(end_interval);
      poll();
    }
    // What is in the pipes; a process that it left behind may hold them open.
    bool more = true;
    while (more) {
      more = false;
      child.read_some(std::chrono::milliseconds(0), [&](ChildProcess::Stream stream, std::string_view bytes) {
        more = true;
        lines.add(stream, bytes);
      });
    }
    lines.finish();
    if (callbacks.poll) callbacks.poll();
  } catch (...) {
    stop(child, callbacks.grace);
    throw;
  }
  return child.wait();
}

}  // namespace layerstream
