// Attention for bfloat16 and float16: scores, softmax and sums in fp32, rounded once; where
// products are of bfloat16, the probabilities are rounded to it, for the product with the values
// and for the sum that divides it.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/attention/attention_typed.h"

namespace tf {

// Bytes of scratch half_attention_queries needs.
TF_KERNEL_AMX(long half_attention_scratch(const TypedAttentionArgs& args))

// Queries [begin, end) of the heads that share key head `key_head` of batch element `b`, counted
// over (head in group, query).
TF_KERNEL_AMX(void half_attention_queries(const TypedAttentionArgs& args, long b, long key_head,
                                          long begin, long end, void* scratch))

}  // namespace tf
