// Attention backward in fp32 on bfloat16 units, by pieces (bf16_tiles.h).
#pragma once

#include "cpu/attention_backward_kernel.h"

namespace tf {

// As attention_backward_keys(), _scratch (in bytes) and attention_backward() are without pieces.
// The last returns false, with results not all written, where an operand holds a number that pieces
// do not stand for.
TF_KERNEL_SPLIT(long split_attention_backward_keys(const AttentionBackwardArgs& args))
TF_KERNEL_SPLIT(long split_attention_backward_scratch(const AttentionBackwardArgs& args))
TF_KERNEL_SPLIT(bool split_attention_backward(const AttentionBackwardArgs& args, long b,
                                              long key_head, long begin, long end, float* part,
                                              void* scratch))

}  // namespace tf
