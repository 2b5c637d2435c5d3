// Interleaves other work with AMX tile products; for kernel files only.
#pragma once

#include "cpu/gemm/gemm.h"

namespace tf::TF_ISA {
namespace {

// Distributes `total` parts of work over `calls` calls between tile products, `at_once` parts per
// batch. Batches run in a function that is not inlined, whose constants then stay in registers: a
// few instructions between tile products are free, many are not.
class Interleaver {
 public:
  Interleaver(long total, long calls, long at_once)
      : total_(total), between_(max(1, calls * at_once / max(1, total))), countdown_(between_) {
    const long turns = max(1, calls / between_);
    parts_ = (total + turns - 1) / turns;
  }
  // Calls work(begin, end) for the parts that are due.
  template <class Work>
  TF_INLINE void operator()(const Work& work) {
    if (--countdown_ > 0 || done_ == total_) return;
    countdown_ = between_;
    run_until(work, min(done_ + parts_, total_));
  }
  // Runs the remaining parts.
  template <class Work>
  TF_INLINE void finish(const Work& work) {
    if (done_ < total_) run_until(work, total_);
  }

 private:
  template <class Work>
  TF_INLINE void run_until(const Work& work, long until) {
    work(done_, until);
    done_ = until;
  }

  long total_, between_, parts_, countdown_, done_ = 0;
};

// Prefetches a row of n values into the second-level cache.
template <class T>
void fetch_row(const T* row, long n) {
  for (long j = 0; j < n; j += kLine / static_cast<long>(sizeof(T)))
    _mm_prefetch(reinterpret_cast<const char*>(row + j), _MM_HINT_T1);
}

// Prefetches the next data into the second-level cache, distributed over `calls` calls.
class FetchAhead {
 public:
  FetchAhead(const void* next, long bytes, long calls)
      : at_(static_cast<const char*>(next)), share_(bytes / kLine / max(1, calls) + 1) {}
  TF_INLINE void operator()() {
    for (long line = 0; line < share_; ++line, at_ += kLine) _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  const char* at_;
  long share_;
};

}  // namespace
}  // namespace tf::TF_ISA
