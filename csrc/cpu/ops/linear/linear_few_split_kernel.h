// activation(x W^T + bias) + residual in fp32 for few rows, by pieces (bf16_tiles.h) of weights in
// fp32.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/linear/linear_typed.h"

namespace tf {

// Bytes of scratch few_split_linear_block needs.
TF_KERNEL_SPLIT(long few_split_linear_scratch(const TypedLinearArgs& args))

// The panels [panel_begin, panel_end) of all rows; args.packed are panels as linear_kernel.h has
// them.
TF_KERNEL_SPLIT(void few_split_linear_block(const TypedLinearArgs& args, long panel_begin,
                                            long panel_end, void* scratch))

}  // namespace tf
