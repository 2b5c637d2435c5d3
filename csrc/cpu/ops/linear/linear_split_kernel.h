// activation(x W^T + bias) + residual in fp32 on bfloat16 units, by pieces (bf16_tiles.h).
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/linear/linear_typed.h"

namespace tf {

// Bytes of a packed (n, k) matrix. A panel has as many columns as those of linear_kernel.h.
TF_KERNEL_SPLIT(long split_packed_bytes(long n, long k))

// Packs panels [begin, end) of W (n, k), rows stride apart; or, transposed, of W^T, given W (k, n).
TF_KERNEL_SPLIT(void split_pack_panels(const float* weight, long stride, long n, long k,
                                       bool transposed, void* packed, long begin, long end))

// Rows that one call of split_linear_block should be given, at most.
TF_KERNEL_SPLIT(long split_linear_row_block(const TypedLinearArgs& args))

// Bytes of scratch split_linear_block needs.
TF_KERNEL_SPLIT(long split_linear_scratch(const TypedLinearArgs& args))

// Rows [row_begin, row_end) of the panels [panel_begin, panel_end).
TF_KERNEL_SPLIT(void split_linear_block(const TypedLinearArgs& args, long row_begin, long row_end,
                                        long panel_begin, long panel_end, void* scratch))

}  // namespace tf
