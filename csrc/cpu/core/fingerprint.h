// Whether a matrix has changed since its fingerprint was taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/core/fingerprint_kernel.h"

namespace tf {

// Tells whether a weight in memory is still what it was when it was packed, whoever wrote to it:
// through .data, NumPy or shared memory, which PyTorch's version counters do not see.
class Fingerprint {
 public:
  // Takes it: reads the whole matrix once.
  explicit Fingerprint(const FingerprintArgs& matrix);

  // Compares some of the matrix. Each call reads something of every row and of every column, each
  // call something else, so that everything was read after at most as many calls as a row has lines
  // of 64 bytes. For a product of kAllFrom rows or more it reads everything. Threads may call at
  // the same time.
  bool holds(int64_t rows);

 private:
  // Measured: to read everything takes as long as a dozen or two of the product's rows.
  static constexpr int64_t kReadAllRows = 1024;
  // To read so many lines takes no longer than the call.
  static constexpr int64_t kMinLines = 256;

  FingerprintArgs matrix_;
  std::vector<uint64_t> slices_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace tf
