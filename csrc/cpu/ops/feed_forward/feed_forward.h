// Feed-forward network: dropout(activation(x W1^T + b1)) W2^T + b2 with packed weights; the hidden
// block never leaves the cache. Reduced types are summed in fp32; the hidden block is rounded to
// bfloat16 if products are in bfloat16, else kept in fp32.
#pragma once

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

struct FeedForwardArgs {
  Element type;                   // of all tensors
  const void* x;                  // (m, k), rows x_stride apart
  const void* packed1 = nullptr;  // W1 (f, k) in panels, see LinearKernels
  const void* bias1 = nullptr;    // (f) or nullptr
  const void* packed2 = nullptr;  // W2 (n, f) in panels, or nullptr if y is
  const void* bias2 = nullptr;    // (n) or nullptr
  void* y;                        // (m, n), contiguous, or nullptr: only the hidden units
  Index m, k, f, n, x_stride;
  int activation;
  const void* residual = nullptr;  // (m, n), rows residual_stride apart, added last; or nullptr
  Index residual_stride = 0;
  // For training. The backward uses the same code: x is then dY, W1 is W2 transposed and W2 is W1
  // transposed, and hidden units are multiplied by act' instead of being activated.
  Dropout dropout = {};            // of the hidden units
  Index row = 0;                   // row number of the first row for dropout
  void* preactivation = nullptr;   // (m, f): receives x W1^T + b1; or nullptr
  const void* slope_at = nullptr;  // (m, f): argument of act' in the backward, or nullptr
  void* hidden = nullptr;          // with slope_at, (m, f): receives dz; or nullptr
  void* panels = nullptr;          // with slope_at: receives the activated hidden units in panels
                                   // (see WeightGradientArgs), or nullptr
  // For 8-bit weights. scale1 (f), scale2 (n): multiply the outputs of the two layers.
  // factors1 (k), factors2 (f): multiply their inputs; nullptr: 1.
  const float *scale1 = nullptr, *scale2 = nullptr;
  const float *factors1 = nullptr, *factors2 = nullptr;
};

inline bool trains(const FeedForwardArgs& args) {
  return args.dropout.on || args.preactivation != nullptr || args.slope_at != nullptr ||
         args.hidden != nullptr;
}

// Kernels for weights in one packed layout.
struct FeedForwardKernels {
  Index row_unit;  // row ranges start at multiples
  // Preferred maximum of rows per call of `rows`, and bytes of scratch for that many.
  Index (*row_block)(const FeedForwardArgs& args);
  Index (*scratch)(const FeedForwardArgs& args, Index rows);
  void (*rows)(const FeedForwardArgs& args, Index begin, Index end, void* scratch);
};

TF_KERNEL(const FeedForwardKernels* feed_forward_kernels())
TF_KERNEL_AMX(const FeedForwardKernels* lowp_feed_forward_kernels(Element type))
TF_KERNEL_BF16X3(const FeedForwardKernels* bf16x3_feed_forward_kernels())

// Transforms rows [begin, end) of x W1^T + b1 in fp32, contiguous, into the input of the second
// layer.
TF_KERNEL(void feed_forward_hidden(const FeedForwardArgs& args, float* hidden, Index begin,
                                   Index end))

}  // namespace tf
