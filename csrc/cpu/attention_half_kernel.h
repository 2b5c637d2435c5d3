// Attention for bfloat16 and float16: scores, softmax and sums in fp32, rounded once; where
// products are of bfloat16, the probabilities that multiply the values are rounded to it.
#pragma once

#include "cpu/attention_shape.h"
#include "cpu/dropout.h"
#include "cpu/isa.h"

namespace tf {

struct HalfAttentionArgs : AttentionShape {
  Element type;       // of query, key, value, output and weights: bfloat16 or float16
  const void* query;  // (B, H, T, D), channels adjacent
  const void* key;    // (B, Hkv, S, D), channels adjacent
  const void* value;  // (B, Hkv, S, Dv), channels adjacent
  void* output;       // (B, H, T, Dv), channels adjacent
  // For the backward, (B, H, T), contiguous, or nullptr: P = exp(scores - shift) norm; where
  // nothing is seen, shift is -inf and norm 0.
  float* shift;
  float* norm;
  void* weights;    // (B, H, T, S), contiguous, behind the dropout, or nullptr
  Dropout dropout;  // of the probabilities; rows counted over (B, H, T)
};

// Bytes of scratch half_attention_queries needs.
TF_KERNEL_AMX(long half_attention_scratch(const HalfAttentionArgs& args))

// Queries [begin, end) of the heads that share key head `key_head` of batch element `b`, counted
// over (head in group, query).
TF_KERNEL_AMX(void half_attention_queries(const HalfAttentionArgs& args, long b, long key_head,
                                          long begin, long end, void* scratch))

}  // namespace tf
