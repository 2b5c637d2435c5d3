// Attention of few queries, as in decoding: keys and values are read where they lie, once for each
// query. Packing them for the register tiles would cost more than it saves.
#pragma once

#include "cpu/attention_shape.h"
#include "cpu/isa.h"

namespace tf {

struct FewAttentionArgs : AttentionShape {
  Element type;       // of query, key, value, output and weights
  const void* query;  // (B, H, T, D), channels adjacent
  const void* key;    // (B, Hkv, S, D), channels adjacent
  const void* value;  // (B, Hkv, S, Dv), channels adjacent
  void* output;       // (B, H, T, Dv), channels adjacent
  // For the backward, (B, H, T), contiguous, or nullptr: P = exp(scores - shift) norm; where
  // nothing is seen, shift is -inf and norm 0.
  float* shift;
  float* norm;
  void* weights;  // (B, H, T, S), contiguous, or nullptr
};

// Floats of scratch few_attention_queries needs.
TF_KERNEL(long few_attention_scratch(const FewAttentionArgs& args))

// All queries of the heads that share key head `key_head` of batch element `b`.
TF_KERNEL(void few_attention_queries(const FewAttentionArgs& args, long b, long key_head,
                                     float* scratch))

}  // namespace tf
