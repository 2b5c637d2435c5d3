// dropout(activation(x W1^T + b1)) W2^T + b2 on packed weights, the hidden block never leaving the
// cache. Of half types sums are in fp32; the hidden block is rounded to bfloat16 where the products
// are of bfloat16, else kept in fp32.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct FeedForwardArgs {
  Element type;                   // of all tensors here
  const void* x;                  // (m, k), rows x_stride apart
  const void* packed1 = nullptr;  // W1 (f, k) in panels, see LinearKernels
  const void* bias1 = nullptr;    // (f) or nullptr
  const void* packed2 = nullptr;  // W2 (n, f) in panels, or nullptr where y is
  const void* bias2 = nullptr;    // (n) or nullptr
  void* y;  // (m, n), contiguous, or nullptr: only the hidden units are wanted
  long m, k, f, n, x_stride;
  int activation;
  const void* residual = nullptr;  // (m, n), rows residual_stride apart, added last; or nullptr
  long residual_stride = 0;
  // For training. The backward takes the same way: x is then dY, W1 stands for W2 transposed and
  // W2 for W1 transposed, and hidden units are not activated but multiplied by the slope.
  Dropout dropout = {};            // of the hidden units
  long row = 0;                    // of the first row among those that dropout counts
  void* preactivation = nullptr;   // (m, f): x W1^T + b1 is kept here, or nullptr
  const void* slope_at = nullptr;  // (m, f): where to take act' in the backward, or nullptr
  void* hidden = nullptr;          // with slope_at, (m, f): what meets W2 is kept here, or nullptr
  void* panels = nullptr;          // with slope_at: the activated hidden units as a right factor
                                   // (see WeightGradientArgs), or nullptr
};

inline bool trains(const FeedForwardArgs& args) {
  return args.dropout.on || args.preactivation != nullptr || args.slope_at != nullptr ||
         args.hidden != nullptr;
}

// For weights packed in one way.
struct FeedForwardKernels {
  long row_unit;  // cut rows at multiples
  // Rows that one call of `rows` should be given, at most, but for one, and bytes of scratch for so
  // many.
  long (*row_block)(const FeedForwardArgs& args);
  long (*scratch)(const FeedForwardArgs& args, long rows);
  void (*rows)(const FeedForwardArgs& args, long begin, long end, void* scratch);
};

TF_KERNEL(const FeedForwardKernels* feed_forward_kernels())
TF_KERNEL_AMX(const FeedForwardKernels* lowp_feed_forward_kernels(Element type))
TF_KERNEL_BF16X3(const FeedForwardKernels* bf16x3_feed_forward_kernels())

// Turns rows [begin, end) of x W1^T + b1 in fp32, whole and `f` apart, into what meets W2.
TF_KERNEL(void feed_forward_hidden(const FeedForwardArgs& args, float* hidden, long begin, long end,
                                   float* scratch))
TF_KERNEL(long feed_forward_hidden_scratch(const FeedForwardArgs& args))

}  // namespace tf
