// Attention in fp32 on bfloat16 units, by pieces (bf16_tiles.h).
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/attention/attention_typed.h"

namespace tf {

// Bytes of scratch split_attention_queries needs.
TF_KERNEL_SPLIT(long split_attention_scratch(const TypedAttentionArgs& args))

// Queries [begin, end) of the heads that share key head `key_head` of batch element `b`, counted
// over (head in group, query).
TF_KERNEL_SPLIT(void split_attention_queries(const TypedAttentionArgs& args, long b, long key_head,
                                             long begin, long end, void* scratch))

}  // namespace tf
