// An attention call whose tensors are of a type told by a field.
#pragma once

#include "cpu/ops/attention/attention_shape.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct TypedAttentionArgs : AttentionShape {
  Element type;       // of query, key, value, output and weights
  const void* query;  // (B, H, T, D), channels adjacent
  const void* key;    // (B, Hkv, S, D), channels adjacent
  const void* value;  // (B, Hkv, S, Dv), channels adjacent
  void* output;       // (B, H, T, Dv), channels adjacent
  // For the backward, (B, H, T), contiguous, or nullptr: P = exp(scores - shift) norm; where
  // nothing is seen, shift is -inf and norm 0.
  float* shift;
  float* norm;
  void* weights;       // (B, H, T, S), contiguous, behind the dropout, or nullptr
  Dropout dropout;     // of the probabilities; rows counted over (B, H, T)
  long next_head = 0;  // so far off is the key head that a thread takes next, as a rule; 0: unknown
};

}  // namespace tf
