// Prefetches of one cache line, for access patterns that the hardware does not predict: rows that
// are far apart, and stores one row apart.
#pragma once

#include "cpu/simd/vec.h"

namespace tf::TF_ISA {
namespace {

// Into the first-level cache, for use within some dozen instructions.
TF_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }

// The same for a line that is about to be written.
TF_INLINE void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

// Into the second-level cache: it supports more outstanding misses than the first.
TF_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace tf::TF_ISA
