// The rows' part of the gradients of y = dropout(act(z)) W2^T + b2, z = x W1^T + b1, for half
// types:
//
//   dz = dropout(dy W2) act'(z),  dx = dz W1
//
// and what the weights' gradients take besides: dz in memory, and the hidden units again.
#pragma once

#include "cpu/ops/feed_forward/feed_forward_half_kernel.h"

namespace tf {

struct HalfFeedForwardBackwardArgs {
  // x is dy (m, k), packed1 W2 and packed2 W1 in panels of their columns, and y is dx (m, n), or
  // nullptr: not wanted. No biases.
  HalfFeedForwardArgs products;
  const void* z;  // (m, f), contiguous
  void* grad_z;   // (m, f), contiguous, or nullptr: not wanted
  void* hidden;   // (m, f) in panels of its columns, as half_pack_columns() leaves them, or nullptr
};

// Bytes of scratch half_feed_forward_backward_rows needs for that many rows.
TF_KERNEL_AMX(long half_feed_forward_backward_scratch(const HalfFeedForwardBackwardArgs& args,
                                                      long rows))

// Rows [begin, end); begin is even.
TF_KERNEL_AMX(void half_feed_forward_backward_rows(const HalfFeedForwardBackwardArgs& args,
                                                   long begin, long end, void* scratch))

}  // namespace tf
