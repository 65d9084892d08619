// Host AdamW against the machine's memory bandwidth, one table:
//   host_adamw [parameters in millions = 64] [most threads = usable CPUs] [rounds = 9]
// Each round runs every case once, so that a neighbour on the machine disturbs all of them alike; a figure is
// the median over rounds, a ratio the median of the ratios within each round.

#include <fmt/format.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/host_region.hpp"
#include "core/affinity.hpp"
#include "core/error.hpp"
#include "core/ledger.hpp"
#include "core/random.hpp"
#include "core/worker_pool.hpp"
#include "ops/adamw.hpp"

namespace {

using namespace layerstream;

constexpr std::int64_t piece_elements = 256 * 1024;
constexpr double adamw_bytes = 28.0;  // read and write hi 2, lo 2, m 4, v 4; read g 4
constexpr double triad_bytes = 24.0;  // read b and c, write a, in double (STREAM's count, no write-allocate)

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void for_pieces(WorkerPool& pool, std::int64_t n,
                const std::function<void(std::int64_t, std::int64_t)>& work) {
  pool.parallel_for((n + piece_elements - 1) / piece_elements, [&](std::int64_t piece) {
    const std::int64_t begin = piece * piece_elements;
    work(begin, std::min(n, begin + piece_elements));
  });
}

/// McCalpin's STREAM triad, a = b + scalar·c.
void triad(double* __restrict a, const double* __restrict b, const double* __restrict c, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) a[i] = b[i] + 3.0 * c[i];
}

/// The same with stores that go past the caches, which spares reading `a`: the most that this count of bytes
/// can show. 64-byte aligned; n a multiple of 8.
void streaming_triad(double* __restrict a, const double* __restrict b, const double* __restrict c,
                     std::int64_t n) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<double, 8> d;
  const auto scalar = hn::Set(d, 3.0);
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); i += hn::Lanes(d)) {
    hn::Stream(hn::Add(hn::Load(d, b + i), hn::Mul(scalar, hn::Load(d, c + i))), d, a + i);
  }
  hwy::FlushStream();
}

struct Case {
  std::string name;
  int threads;
  double bytes;       // moved by one run
  double parameters;  // updated by one run; 0 for the triad
  std::function<void(WorkerPool&)> run;
  std::vector<double> gigabytes_per_second;  // one per round
};

std::vector<int> thread_counts(int most) {
  std::vector<int> counts;
  for (int threads = 1; threads < most; threads *= 2) counts.push_back(threads);
  counts.push_back(most);
  return counts;
}

int run(std::int64_t n, int most_threads, int rounds) {
  WorkerPool setup(most_threads);
  HostRegionOptions options{.component = "benchmark", .pool = &setup};
  const std::size_t elements = static_cast<std::size_t>(n);
  HostRegion region(elements * 16 + 8 * Arena::alignment, options);
  Ledger ledger;
  Arena arena(Space::host, region.data(), region.bytes(), ledger);
  const auto array = [&](DType dtype) { return arena.tensor(dtype, {n}, "slab"); };
  const ops::AdamWSlice slab{array(DType::bf16).as<bf16>(), array(DType::i16).as<std::int16_t>(),
                             array(DType::f32).as<float>(), array(DType::f32).as<float>(),
                             array(DType::f32).as<float>(), n};
  float* const gradient = const_cast<float*>(slab.gradient);
  for_pieces(setup, n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint64_t index = static_cast<std::uint64_t>(i);
      const SplitFloat weight = split(static_cast<float>(0.02 * uniform_at(1, 0, index)));
      slab.hi[i] = weight.hi;
      slab.lo[i] = weight.lo;
      gradient[i] = static_cast<float>(uniform_at(1, 1, index) - 0.5);
    }
  });
  // As many bytes as AdamW touches.
  const std::int64_t triad_n = n * 16 / 24 / 8 * 8;
  HostRegion triad_region(static_cast<std::size_t>(triad_n) * 24, options);
  double* const a = static_cast<double*>(triad_region.data());
  double* const b = a + triad_n;
  double* const c = b + triad_n;

  const ops::AdamWScalars scalars =
      ops::adamw_scalars({.learning_rate = 1e-5, .weight_decay = 0.01, .step = 10});
  std::vector<Case> cases;
  const std::vector<int> counts = thread_counts(most_threads);
  for (const auto& [name, kernel] :
       {std::pair{"triad", &triad}, std::pair{"triad, streaming stores", &streaming_triad}}) {
    for (const int threads : counts) {
      cases.push_back({name,
                       threads,
                       triad_bytes * static_cast<double>(triad_n),
                       0.0,
                       [&, kernel = kernel](WorkerPool& pool) {
                         for_pieces(pool, triad_n, [&](std::int64_t begin, std::int64_t end) {
                           kernel(a + begin, b + begin, c + begin, end - begin);
                         });
                       },
                       {}});
    }
  }
  for (const std::string& target : ops::adamw_host_targets()) {
    for (const int threads : counts) {
      cases.push_back({target,
                       threads,
                       adamw_bytes * static_cast<double>(n),
                       static_cast<double>(n),
                       [&, target](WorkerPool& pool) {
                         for_pieces(pool, n, [&](std::int64_t begin, std::int64_t end) {
                           ops::adamw_host_on(target,
                                              {slab.hi + begin, slab.lo + begin, slab.exp_avg + begin,
                                               slab.exp_avg_sq + begin, slab.gradient + begin, end - begin},
                                              scalars);
                         });
                       },
                       {}});
    }
  }
  std::vector<std::unique_ptr<WorkerPool>> pools;
  for (const int threads : counts) pools.push_back(std::make_unique<WorkerPool>(threads));
  const auto pool_of = [&](const Case& one) -> WorkerPool& {
    return *pools[static_cast<std::size_t>(std::find(counts.begin(), counts.end(), one.threads) -
                                           counts.begin())];
  };
  for (int round = -1; round < rounds; ++round) {  // round −1 warms up
    for (Case& one : cases) {
      const double seconds = seconds_of([&] { one.run(pool_of(one)); });
      if (round >= 0) one.gigabytes_per_second.push_back(one.bytes / seconds * 1e-9);
    }
  }

  fmt::print(
      "{} Mi parameters, {} rounds, medians; AdamW at {} B/param, triad at {} B/element; huge pages: {}\n\n",
      n >> 20, rounds, adamw_bytes, triad_bytes, region.has_huge_pages() ? "yes" : "no");
  fmt::print("| case                    | threads | GB/s  | Gparam/s | of the faster triad |\n");
  fmt::print("|-------------------------|---------|-------|----------|---------------------|\n");
  for (const Case& one : cases) {
    // Within a round, against the faster triad on as many threads.
    std::vector<double> ratios;
    for (std::size_t i = 0; i < one.gigabytes_per_second.size(); ++i) {
      double best = 0.0;
      for (const Case& other : cases) {
        if (other.parameters != 0.0 || other.threads != one.threads) continue;
        best = std::max(best, other.gigabytes_per_second[i]);
      }
      ratios.push_back(one.gigabytes_per_second[i] / best);
    }
    const double rate = median(one.gigabytes_per_second);
    const std::string parameters = one.parameters == 0.0 ? "" : fmt::format("{:.3f}", rate / adamw_bytes);
    fmt::print("| {:<23} | {:>7} | {:>5.2f} | {:>8} | {:>19.2f} |\n", one.name, one.threads, rate, parameters,
               median(ratios));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, long fallback) {
    return argc > index ? std::strtol(argv[index], nullptr, 10) : fallback;
  };
  const long millions = argument(1, 64);
  const long threads = argument(2, probe_cpus().usable());
  const long rounds = argument(3, 9);
  if (millions < 1 || threads < 1 || rounds < 1) {
    fmt::print(stderr, "host_adamw [parameters in millions] [most threads] [rounds]: all at least 1\n");
    return exit_code::refused;
  }
  try {
    return run(static_cast<std::int64_t>(millions) << 20, static_cast<int>(threads),
               static_cast<int>(rounds));
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return error.code();
  }
}
