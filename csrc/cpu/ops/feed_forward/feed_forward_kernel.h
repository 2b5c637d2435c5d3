// dropout(activation(x W1^T + b1)) W2^T + b2 on packed weights, the hidden block never leaving the
// cache.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct FeedForwardArgs {
  const float* x;        // (m, k), rows x_stride apart
  const float* packed1;  // W1 (f, k) in panels (linear_kernel.h)
  const float* bias1;    // (f) or nullptr
  const float* packed2;  // W2 (n, f) in panels
  const float* bias2;    // (n) or nullptr
  float* y;              // (m, n), contiguous, or nullptr: only the hidden units are wanted
  long m, k, f, n, x_stride;
  int activation;
  const float* residual = nullptr;  // (m, n), rows residual_stride apart, added last; or nullptr
  long residual_stride = 0;
  // For training. The backward takes the same way: x is then dY, W1 stands for W2 transposed and
  // W2 for W1 transposed, and hidden units are not activated but multiplied by the slope.
  Dropout dropout = {};             // of the hidden units
  long row = 0;                     // of the first row among those that dropout counts
  float* preactivation = nullptr;   // (m, f): x W1^T + b1 is kept here, or nullptr
  const float* slope_at = nullptr;  // (m, f): where to take act' in the backward, or nullptr
  float* hidden = nullptr;          // (m, f): what meets W2 is kept here, or nullptr
  float* panels = nullptr;          // with slope_at: the activated hidden units as a right factor
                                    // (see WeightGradientArgs), or nullptr
};

inline bool trains(const FeedForwardArgs& args) {
  return args.dropout.on || args.preactivation != nullptr || args.slope_at != nullptr ||
         args.hidden != nullptr;
}

// Turns rows [begin, end) of x W1^T + b1, whole and `f` apart, into what meets W2.
TF_KERNEL(void feed_forward_hidden(const FeedForwardArgs& args, float* hidden, long begin, long end,
                                   float* scratch))
TF_KERNEL(long feed_forward_hidden_scratch(const FeedForwardArgs& args))

// Rows that one call of feed_forward_rows should be given, at most.
TF_KERNEL(long feed_forward_row_block(const FeedForwardArgs& args))

// Floats of scratch feed_forward_rows needs for that many rows.
TF_KERNEL(long feed_forward_scratch(const FeedForwardArgs& args, long rows))

// Rows [begin, end).
TF_KERNEL(void feed_forward_rows(const FeedForwardArgs& args, long begin, long end, float* scratch))

}  // namespace tf
