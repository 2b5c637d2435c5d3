// Attention backward on bfloat16 units: of bfloat16, where P and dS are rounded to it, and on AMX
// tiles (bf16_tiles.h) of fp32 in pieces; sums are in fp32.
#pragma once

#include "cpu/ops/attention/attention_backward_kernel.h"

namespace tf {

// As attention_backward_keys(), _scratch (in bytes) and attention_backward() are without tiles; for
// bfloat16, `part` must be given. They return false, with results not all written, where an
// operand holds a number that pieces do not stand for.
TF_KERNEL_UNITS(long tiles_attention_backward_keys(const AttentionBackwardArgs& args))
TF_KERNEL_UNITS(long tiles_attention_backward_scratch(const AttentionBackwardArgs& args))
TF_KERNEL_UNITS(bool tiles_attention_backward(const AttentionBackwardArgs& args, long b,
                                              long key_head, long begin, long end, float* part,
                                              void* scratch))

// Likewise attention_mask_backward() and the queries that it takes at a time.
TF_KERNEL_UNITS(long tiles_attention_backward_queries())
TF_KERNEL_UNITS(bool tiles_attention_mask_backward(const AttentionBackwardArgs& args, long b,
                                                   long h, long tile, long begin, long end,
                                                   void* scratch))

}  // namespace tf
