// activation(x W1^T + b1) W2^T + b2 on packed weights, the hidden block never leaving the cache.
#pragma once

#include "cpu/isa.h"

namespace tf {

struct FeedForwardArgs {
  const float* x;        // (m, k), rows x_stride apart
  const float* packed1;  // W1 (f, k) in panels (linear_kernel.h)
  const float* bias1;    // (f) or nullptr
  const float* packed2;  // W2 (n, f) in panels
  const float* bias2;    // (n) or nullptr
  float* y;              // (m, n), contiguous
  long m, k, f, n, x_stride;
  int activation;
  const float* residual = nullptr;  // (m, n), rows residual_stride apart, added last; or nullptr
  long residual_stride = 0;
};

// Rows that one call of feed_forward_rows should be given, at most.
TF_KERNEL(long feed_forward_row_block(const FeedForwardArgs& args))

// Floats of scratch feed_forward_rows needs for that many rows.
TF_KERNEL(long feed_forward_scratch(const FeedForwardArgs& args, long rows))

// Rows [begin, end).
TF_KERNEL(void feed_forward_rows(const FeedForwardArgs& args, long begin, long end, float* scratch))

}  // namespace tf
