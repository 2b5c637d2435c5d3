// dropout(activation(x W1^T + b1)) W2^T + b2 for bfloat16 and float16 with fp32 sums; the hidden
// block is rounded to bfloat16 where the products are of bfloat16, else kept in fp32.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct HalfFeedForwardArgs {
  Element type;         // of all tensors here: bfloat16 or float16
  const void* x;        // (m, k), rows x_stride apart
  const void* packed1;  // W1 (f, k) in panels (linear_half_kernel.h)
  const void* bias1;    // (f) or nullptr
  const void* packed2;  // W2 (n, f) in panels, or nullptr where y is
  const void* bias2;    // (n) or nullptr
  void* y;              // (m, n), contiguous, or nullptr: only the hidden units are wanted
  long m, k, f, n, x_stride;
  int activation;
  Dropout dropout;                 // of the hidden block
  long row = 0;                    // of the first row among those that dropout counts
  void* preactivation = nullptr;   // (m, f), contiguous: x W1^T + b1 is kept here, or nullptr
  const void* residual = nullptr;  // (m, n), rows residual_stride apart, is added to y, or nullptr
  long residual_stride = 0;
};

// Rows that one call of half_feed_forward_rows should be given, at most.
TF_KERNEL_AMX(long half_feed_forward_row_block(const HalfFeedForwardArgs& args))

// Bytes of scratch half_feed_forward_rows needs for that many rows.
TF_KERNEL_AMX(long half_feed_forward_scratch(const HalfFeedForwardArgs& args, long rows))

// Rows [begin, end).
TF_KERNEL_AMX(void half_feed_forward_rows(const HalfFeedForwardArgs& args, long begin, long end,
                                          void* scratch))

}  // namespace tf
