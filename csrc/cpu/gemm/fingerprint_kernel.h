// Checksums over slices of a matrix; each slice touches every row and every column.
#pragma once

#include <cstdint>

#include "cpu/core/isa.h"

namespace tf {

// Rows of `row_bytes` bytes, `stride` bytes apart, divided into lines of kLineBytes (the last one
// may be shorter). Line l of row r belongs to slice (l - r * step()) mod lines, i.e. a slice is a
// diagonal, so that step() adjacent slices touch every column as well as every row.
struct FingerprintArgs {
  const char* data;
  Index rows, row_bytes, stride;

  static constexpr Index kLineBytes = 64;
  Index lines() const { return (row_bytes + kLineBytes - 1) / kLineBytes; }
  // Slices of each row that a check reads, so that it touches every line of 64 bytes.
  Index step() const { return (lines() + rows - 1) / rows; }
};

// The sum over rows [begin, end) of the checksums of their lines in slices first to
// first + count - 1 (mod lines). Sums of parts add up to that of the whole, mod 2^64.
TF_KERNEL(uint64_t fingerprint_rows(const FingerprintArgs& args, Index begin, Index end,
                                    Index first, Index count))

// Adds the sums over rows [begin, end) to those of all slices.
TF_KERNEL(void fingerprint_slices(const FingerprintArgs& args, Index begin, Index end,
                                  uint64_t* slices))

}  // namespace tf
