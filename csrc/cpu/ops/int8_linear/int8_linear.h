// Linear layer and feed-forward network with 8-bit products (gemm/int8.h), for inference. The
// formula is that of transformer_fast/reference/int8_linear.py, and every operation on floats is
// rounded by itself, so that results before an activation have the same bits.
#pragma once

#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/ops/linear/linear.h"

namespace tf {

// Bias and residual have the given type, and so have x and y, except in fp32, where one of the two
// may be bfloat16. All types have the same layout of packed weights.
TF_KERNEL_INT8(const LinearKernels* int8_linear_kernels(Element type, Element x_type,
                                                        Element y_type))
// Hidden units are rounded to bfloat16. No dropout, nothing for training.
TF_KERNEL_INT8(const FeedForwardKernels* int8_feed_forward_kernels(Element type))

// Sums of more products could overflow 32 bits, and split sums of more weights 16 bits.
constexpr Index kMaxInt8Depth = 65536;

}  // namespace tf
