// Attention of few queries, as in decoding: keys and values are read where they lie, once for each
// query. Packing them for the register tiles would cost more than it saves.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/attention/attention_typed.h"

namespace tf {

// Floats of scratch few_attention_queries needs; args without dropout.
TF_KERNEL(long few_attention_scratch(const TypedAttentionArgs& args))

// All queries of the heads that share key head `key_head` of batch element `b`.
TF_KERNEL(void few_attention_queries(const TypedAttentionArgs& args, long b, long key_head,
                                     float* scratch))

}  // namespace tf
