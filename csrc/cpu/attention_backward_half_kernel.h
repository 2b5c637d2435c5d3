// Attention backward in bfloat16 on AMX tiles: P and dS are rounded to it, sums are in fp32.
#pragma once

#include "cpu/attention_backward_kernel.h"

namespace tf {

// As those of attention_backward_split_kernel.h. `part` must be given.
TF_KERNEL_SPLIT(long half_attention_backward_keys(const AttentionBackwardArgs& args))
TF_KERNEL_SPLIT(long half_attention_backward_scratch(const AttentionBackwardArgs& args))
TF_KERNEL_SPLIT(bool half_attention_backward(const AttentionBackwardArgs& args, long b,
                                             long key_head, long begin, long end, float* part,
                                             void* scratch))

}  // namespace tf
