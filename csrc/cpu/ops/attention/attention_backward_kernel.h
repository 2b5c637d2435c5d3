// Gradients of attention without the (T, S) probabilities, recomputed from what the forward kept.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/simd/dropout.h"

namespace tf {

// Channels of query, key, value, output and grad are adjacent. Gradients that are not wanted:
// nullptr.
struct AttentionBackwardArgs : AttentionShape {
  Element type;          // of those five and of the gradients but grad_mask: float32 or bfloat16
  const void* query;     // (B, H, T, D)
  const void* key;       // (B, Hkv, S, D)
  const void* value;     // (B, Hkv, S, Dv)
  const void* output;    // (B, H, T, Dv)
  const void* grad;      // (B, H, T, Dv): of output
  const float* weights;  // (B, H, T, S), contiguous, and its gradient; nullptr where that is
  const float* grad_weights;  // not given
  const float* shift;         // (B, H, T), contiguous: P = exp(scores - shift) norm
  const float* norm;          // 0 where nothing is seen
  float* delta;               // (B, H, T): sum over keys of P dP
  float dominant;             // keys of a larger probability get their dS with more care
  void* grad_query;           // (B, H, T, D)
  void* grad_key;             // (B, Hkv, S, D)
  void* grad_value;           // (B, Hkv, S, Dv)
  float* grad_mask;           // mask_size, contiguous, zeroed
  long grad_stride[3], grad_query_stride[3], grad_key_stride[3], grad_value_stride[3];
  long mask_size[4];
  Dropout dropout;  // rows counted over (B, H, T)
};

// `dominant` where the output that the forward kept is in fp32. In half types it is so large that
// few rows have such a key: less care does where the others have many times what the output is
// rounded by.
constexpr float kDominantInFloat = 0.5f, kDominantInHalf = 1.0f - 0x1p-5f;

// Rows [begin, end) of delta, counted over (B, H, T).
TF_KERNEL(void attention_delta(const AttentionBackwardArgs& args, long begin, long end))

// Keys that are taken at a time. The cut does not depend on the number of threads.
TF_KERNEL(long attention_backward_keys(const AttentionBackwardArgs& args))

// Floats of scratch that attention_backward, which is for float32, needs.
TF_KERNEL(long attention_backward_scratch(const AttentionBackwardArgs& args))

// Keys [begin, end) of key head `key_head` of batch element b, begin a multiple of
// attention_backward_keys(): writes their gradients, and what they give to grad_query into `part`
// (heads of the group, T, D), or into grad_query itself if part is nullptr.
TF_KERNEL(void attention_backward(const AttentionBackwardArgs& args, long b, long key_head,
                                  long begin, long end, float* part, float* scratch))

// Row [begin, end) of the group's (heads, T) in grad_query: the sum of `parts` parts.
TF_KERNEL(void attention_backward_sum(const AttentionBackwardArgs& args, long b, long key_head,
                                      const float* part, long parts, long begin, long end))

}  // namespace tf
