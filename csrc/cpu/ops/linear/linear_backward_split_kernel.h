// The weight gradient in fp32 on bfloat16 units, by pieces (bf16_tiles.h).
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/linear/linear_backward_kernel.h"

namespace tf {

// Whether x is read as it is; else it has to be in args.panels.
inline bool reads_x(const WeightGradientArgs& args) {
  return args.panels == nullptr && args.activation == 0 && !args.dropout.on;
}

// Bytes of X (m, k) in pieces.
TF_KERNEL_SPLIT(long split_weight_gradient_x_bytes(long m, long k))

// Splits blocks [begin, end) of kSplitBlock rows of X.
constexpr long kSplitBlock = 32;
TF_KERNEL_SPLIT(void split_weight_gradient_x(const WeightGradientArgs& args, void* pieces,
                                             long begin, long end))

// Rows and columns of dW that one call of split_weight_gradient should be given, at most.
TF_KERNEL_SPLIT(long split_weight_gradient_rows())
TF_KERNEL_SPLIT(long split_weight_gradient_columns())

// Bytes of scratch split_weight_gradient needs.
TF_KERNEL_SPLIT(long split_weight_gradient_scratch())

// Rows [row_begin, row_end) and columns [column_begin, column_end) of dW; column_begin is a
// multiple of panel_columns().
TF_KERNEL_SPLIT(void split_weight_gradient(const WeightGradientArgs& args, long row_begin,
                                           long row_end, long column_begin, long column_end,
                                           void* scratch))

}  // namespace tf
