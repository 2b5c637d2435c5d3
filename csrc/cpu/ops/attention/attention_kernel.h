// Attention without the (T, S) scores: softmax(scale Q K^T + mask) V by online softmax.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/attention/attention_shape.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct AttentionArgs : AttentionShape {
  const float* query;  // (B, H, T, D)
  const float* key;    // (B, Hkv, S, D)
  const float* value;  // (B, Hkv, S, Dv)
  float* output;       // (B, H, T, Dv), channels adjacent
  // For the backward, (B, H, T), contiguous, or nullptr: P = exp(scores - shift) norm; where
  // nothing is seen, shift is -inf and norm 0.
  float* shift;
  float* norm;
  float* weights;   // (B, H, T, S), contiguous, behind the dropout, or nullptr
  Dropout dropout;  // of the probabilities; rows counted over (B, H, T)
};

// Floats of scratch attention_queries needs.
TF_KERNEL(long attention_scratch(const AttentionArgs& args))

// Queries [begin, end) of the heads that share key head `key_head` of batch element `b`, counted
// over (head in group, query).
TF_KERNEL(void attention_queries(const AttentionArgs& args, long b, long key_head, long begin,
                                 long end, float* scratch))

}  // namespace tf
