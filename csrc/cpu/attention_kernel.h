// Attention without the (T, S) scores: softmax(scale Q K^T + mask) V by online softmax.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace tf {

// Strides are in elements, for (batch, head, position, channel). Ragged batches have no stride for
// the batch: element b's queries are the rows [query_starts[b], query_starts[b + 1]) of one long
// sequence, its keys likewise, and queries and keys are the largest counts.
struct AttentionArgs {
  const float* query;           // (B, H, T, D)
  const float* key;             // (B, Hkv, S, D)
  const float* value;           // (B, Hkv, S, Dv)
  const void* mask;             // broadcast to (B, H, T, S) by its strides, or nullptr
  const int64_t* key_lengths;   // (B) or nullptr
  const int64_t* query_starts;  // (B + 1), or nullptr: not ragged
  const int64_t* key_starts;    // both or none
  float* output;                // (B, H, T, Dv), channels adjacent
  float* lse;      // (B, H, T), contiguous: log of the sum of exp(scores), -inf where nothing is
                   // seen; or nullptr
  float* weights;  // (B, H, T, S), contiguous, or nullptr
  long batch, heads, key_heads, queries, keys, size, value_size;
  long query_stride[4], key_stride[4], value_stride[4], mask_stride[4], output_stride[3];
  float scale;
  bool mask_is_bool;  // bytes, nonzero = may attend; else floats that are added
  bool causal;
};

inline long query_count(const AttentionArgs& args, long b) {
  return args.query_starts == nullptr ? args.queries
                                      : args.query_starts[b + 1] - args.query_starts[b];
}
inline long key_count(const AttentionArgs& args, long b) {
  return args.key_starts == nullptr ? args.keys : args.key_starts[b + 1] - args.key_starts[b];
}

// Floats of scratch attention_queries needs.
TF_KERNEL(long attention_scratch(const AttentionArgs& args))

// Queries [begin, end) of the heads that share key head `key_head` of batch element `b`, counted
// over (head in group, query).
TF_KERNEL(void attention_queries(const AttentionArgs& args, long b, long key_head, long begin,
                                 long end, float* scratch))

}  // namespace tf
