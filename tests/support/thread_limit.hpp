#pragma once

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <stdexcept>

namespace layerstream::test {

/// While it lives no more than so many further threads can be started: each gets a stack of 1 GiB, and of
/// address space there is not more. (A limit of processes would not bind root.)
class ThreadLimit {
 public:
  explicit ThreadLimit(std::size_t threads) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    expect(pages > 0 && ::getrlimit(RLIMIT_AS, &former_) == 0);
    expect(::pthread_getattr_default_np(&former_attributes_) == 0);
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, stack_bytes);
    expect(::pthread_setattr_default_np(&attributes) == 0);
    ::pthread_attr_destroy(&attributes);
    // Half a stack for all else.
    const std::size_t bytes =
        pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + threads * stack_bytes + stack_bytes / 2;
    const struct rlimit limit { .rlim_cur = bytes, .rlim_max = former_.rlim_max };
    expect(::setrlimit(RLIMIT_AS, &limit) == 0);
  }
  ~ThreadLimit() {
    ::setrlimit(RLIMIT_AS, &former_);
    ::pthread_setattr_default_np(&former_attributes_);
    ::pthread_attr_destroy(&former_attributes_);
  }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  static constexpr std::size_t stack_bytes = std::size_t{1} << 30;
  static void expect(bool done) {
    if (!done) throw std::runtime_error("the number of threads cannot be limited here");
  }
  struct rlimit former_ {};
  pthread_attr_t former_attributes_{};
};

}  // namespace layerstream::test
