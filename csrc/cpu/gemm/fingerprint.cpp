#include "cpu/gemm/fingerprint.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace tf {
namespace {

// Minimum number of lines per thread: waking a thread takes as long as reading them.
constexpr int64_t kGrain = 8192;

// Minimum number of weights per thread, since waking a thread takes as long as checking them.
constexpr int64_t kWeights = 4;

int64_t grain_of(int64_t lines_per_row) { return std::max<int64_t>(1, kGrain / lines_per_row); }

void add_to(uint64_t& sum, uint64_t part) {
  __atomic_fetch_add(&sum, part, __ATOMIC_RELAXED);  // std::atomic_ref: not in every libc++
}

}  // namespace

Fingerprint::Fingerprint(const FingerprintArgs& matrix)
    : matrix_(matrix), slices_(static_cast<size_t>(matrix.lines())) {
  torch::stable::parallel_for(0, matrix_.rows, grain_of(matrix_.lines()),
                              [&](int64_t begin, int64_t end) {
                                std::vector<uint64_t> part(slices_.size());
                                TF_DISPATCH(fingerprint_slices, matrix_, begin, end, part.data());
                                for (size_t i = 0; i < part.size(); ++i)
                                  add_to(slices_[i], part[i]);
                              });
}

bool Fingerprint::holds(int64_t rows) {
  const int64_t lines = matrix_.lines();
  const int64_t enough = (kMinLines + matrix_.rows - 1) / matrix_.rows;
  const int64_t count =
      rows >= kReadAllRows ? lines : std::min(lines, std::max<int64_t>(matrix_.step(), enough));
  const int64_t first = static_cast<int64_t>(
      next_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed) %
      static_cast<uint64_t>(lines));
  uint64_t expected = 0, found = 0;
  for (int64_t i = 0; i < count; ++i) expected += slices_[static_cast<size_t>((first + i) % lines)];
  torch::stable::parallel_for(0, matrix_.rows, grain_of(count), [&](int64_t begin, int64_t end) {
    add_to(found, TF_DISPATCH(fingerprint_rows, matrix_, begin, end, first, count));
  });
  return found == expected;
}

bool all_hold(const std::vector<Fingerprint*>& fingerprints, int64_t rows) {
  const auto count = static_cast<int64_t>(fingerprints.size());
  std::atomic<bool> all{true};
  const auto check = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && all.load(std::memory_order_relaxed); ++i)
      if (!fingerprints[static_cast<size_t>(i)]->holds(rows)) all = false;
  };
  // holds() reads everything then, and divides each matrix among the threads.
  if (rows >= Fingerprint::kReadAllRows)
    check(0, count);
  else
    torch::stable::parallel_for(0, count, kWeights, check);
  return all;
}

}  // namespace tf
