#include "cpu/probe/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kRoundSeconds = 0.015;
constexpr int kRounds = 4;

// Runs work(thread) on all threads, started together; returns the seconds until the last one has
// finished. Throws std::system_error if the system starts no more threads.
template <class Work>
double run_together(int threads, const Work& work) {
  enum State { wait, run, stop };
  std::atomic<int> ready{0}, state{wait};
  std::vector<std::thread> others;
  const auto finish = [&](State last) {
    state.store(last, std::memory_order_release);
    if (last == run) work(0);
    for (std::thread& other : others) other.join();
  };
  try {
    for (int t = 1; t < threads; ++t) {
      others.emplace_back([&, t] {
        ready.fetch_add(1);
        while (state.load(std::memory_order_acquire) == wait) std::this_thread::yield();
        if (state.load(std::memory_order_relaxed) == run) work(t);
      });
    }
  } catch (...) {
    finish(stop);
    throw;
  }
  while (ready.load() < threads - 1) std::this_thread::yield();
  const Clock::time_point start = Clock::now();
  finish(run);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Best rate of work(thread, repeats), where one repeat counts as `units` on every thread. The
// search for a fitting number of repeats also warms caches and clock rates up.
template <class Work>
double best_rate(int threads, double units, const Work& work) {
  const auto seconds_of = [&](Index repeats) {
    return run_together(threads, [&](int thread) { work(thread, repeats); });
  };
  Index repeats = 1;
  double seconds = seconds_of(repeats);
  while (seconds < kRoundSeconds / 2) {
    repeats *= 2;
    seconds = seconds_of(repeats);
  }
  repeats = std::max(Index{1}, static_cast<Index>(repeats * kRoundSeconds / seconds));
  double best = 0.0;
  for (int round = 0; round < kRounds; ++round) {
    best = std::max(best, units * threads * static_cast<double>(repeats) / seconds_of(repeats));
  }
  return best / 1e9;
}

void check_threads(int threads) {
  if (threads < 1 || threads > 4096) {
    throw std::invalid_argument("threads must be between 1 and 4096, got " +
                                std::to_string(threads));
  }
}

// Page-aligned floats, written once so that every page exists.
class Buffer {
 public:
  explicit Buffer(std::size_t count)
      : data_(static_cast<float*>(::operator new(count * sizeof(float), kAlignment))) {
    std::fill_n(data_, count, 1.0f);
  }
  ~Buffer() { ::operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{4096};
  float* data_;
};

std::size_t floats_per_thread(std::size_t bytes, int threads) {
  check_threads(threads);
  const std::size_t count = bytes / sizeof(float) / static_cast<std::size_t>(threads);
  if (count < 1024) {
    throw std::invalid_argument("bytes must be at least 4096 for each thread, got " +
                                std::to_string(bytes));
  }
  return count;
}

void check_dot(Isa isa, Dot type) {
  if (type == Dot::none || has_dot(isa, type)) return;
  std::string others;
  for (const Isa other : kIsas)
    if (has_dot(other, type)) others += (others.empty() ? "" : ", ") + std::string(isa_name(other));
  throw std::invalid_argument(std::string("isa: '") + isa_name(isa) + "' has no " + dot_name(type) +
                              " dot product; these have: " + others);
}

constexpr Index kFmaBatch = 1024;

// `loop` runs that many iterations and returns the number of flops.
template <class Loop>
double probe_loop(int threads, Isa isa, Dot type, const Loop& loop) {
  check_threads(threads);
  check_dot(isa, type);
  const double flops = loop(kFmaBatch);
  return best_rate(threads, flops, [&](int, Index repeats) { loop(kFmaBatch * repeats); });
}

}  // namespace

double probe_fma(int threads, Isa isa) {
  return probe_loop(threads, isa, Dot::none,
                    [isa](Index count) { return TF_DISPATCH_TO(isa, fma_flops, count); });
}

double probe_bf16_dot(int threads, Isa isa) {
  return probe_loop(threads, isa, Dot::bf16,
                    [isa](Index count) { return TF_DISPATCH_TO(isa, bf16_dot_flops, count); });
}

double probe_int8_dot(int threads, Isa isa) {
  return probe_loop(threads, isa, Dot::int8,
                    [isa](Index count) { return TF_DISPATCH_TO(isa, int8_dot_flops, count); });
}

double probe_read_bandwidth(std::size_t bytes, int threads) {
  const std::size_t share = floats_per_thread(bytes, threads);
  Buffer buffer(share * threads);
  std::vector<float> sums(threads);
  const Isa isa = current_isa();
  const double rate = best_rate(threads, share * sizeof(float), [&](int thread, Index repeats) {
    float sum = 0.0f;
    for (Index repeat = 0; repeat < repeats; ++repeat) {
      const float* part = buffer.data() + share * thread;
      asm volatile("" : "+r"(part) : : "memory");  // every repeat reads anew
      sum += TF_DISPATCH_TO(isa, sum_floats, part, static_cast<Index>(share));
    }
    sums[thread] = sum;
  });
  asm volatile("" : : "r"(sums.data()) : "memory");
  return rate;
}

double probe_copy_bandwidth(std::size_t bytes, int threads) {
  const std::size_t share = floats_per_thread(bytes, threads);
  Buffer source(share * threads), target(share * threads);
  return best_rate(threads, 2.0 * share * sizeof(float), [&](int thread, Index repeats) {
    for (Index repeat = 0; repeat < repeats; ++repeat) {
      float* to = target.data() + share * thread;
      std::memcpy(to, source.data() + share * thread, share * sizeof(float));
      asm volatile("" : : "r"(to) : "memory");
    }
  });
}

}  // namespace tf
