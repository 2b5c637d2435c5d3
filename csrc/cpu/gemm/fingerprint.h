// Detects changes of a matrix since its fingerprint was taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/gemm/fingerprint_kernel.h"

namespace tf {

// Checks that a weight has not been modified since it was packed, including writes that PyTorch's
// version counters do not record: through .data, NumPy or shared memory.
class Fingerprint {
 public:
  // Reads the whole matrix once.
  explicit Fingerprint(const FingerprintArgs& matrix);

  // Verifies a part of the matrix. Each call reads a part of every row and of every column, and
  // successive calls read different parts, so that everything has been read after at most as many
  // calls as a row has cache lines. For products of kReadAllRows rows or more, one call reads
  // everything. Thread-safe.
  bool holds(int64_t rows);

  // Measured: reading everything takes as long as 12 to 40 rows of the product.
  static constexpr int64_t kReadAllRows = 1024;

 private:
  // Reading this many lines takes no longer than the call itself.
  static constexpr int64_t kMinLines = 256;

  FingerprintArgs matrix_;
  std::vector<uint64_t> slices_;
  std::atomic<uint64_t> next_{0};
};

// Whether all of them hold. Those of a program's weights are divided among the threads: most of the
// weights are not in the cache.
bool all_hold(const std::vector<Fingerprint*>& fingerprints, int64_t rows);

}  // namespace tf
