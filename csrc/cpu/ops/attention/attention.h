// Attention without the (T, S) scores: softmax(scale Q K^T + mask) V by online softmax. Of bfloat16
// and float16 scores, softmax and sums are in fp32, rounded once; where products are of bfloat16,
// the probabilities are rounded to it, for the product with the values and for the sum that divides
// it.
#pragma once

#include <cstdint>

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

// Strides are in elements, for (batch, head, position, channel). Ragged batches have no stride for
// the batch: element b's queries are the rows [query_starts[b], query_starts[b + 1]) of one long
// sequence, its keys likewise, and queries and keys are the largest counts.
struct AttentionShape {
  const void* mask;             // broadcast to (B, H, T, S) by its strides, or nullptr
  const int64_t* key_lengths;   // (B) or nullptr
  const int64_t* query_starts;  // (B + 1), or nullptr: not ragged
  const int64_t* key_starts;    // both or none
  long batch, heads, key_heads, queries, keys, size, value_size;
  long query_stride[4], key_stride[4], value_stride[4], mask_stride[4], output_stride[3];
  float scale;
  Element mask_type;  // boolean: bytes, nonzero = may attend; else what is added, -inf hiding
  bool causal;
};

inline long query_count(const AttentionShape& shape, long b) {
  return shape.query_starts == nullptr ? shape.queries
                                       : shape.query_starts[b + 1] - shape.query_starts[b];
}
inline long key_count(const AttentionShape& shape, long b) {
  return shape.key_starts == nullptr ? shape.keys : shape.key_starts[b + 1] - shape.key_starts[b];
}

struct AttentionArgs : AttentionShape {
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

// All queries on torch's threads.
void run_attention(AttentionArgs args);

// ..._scratch: bytes of scratch that the kernel needs. ..._queries: queries [begin, end) of the
// heads that share key head `key_head` of batch element `b`, counted over (head in group, query).

// float32, whose channels need not be adjacent.
TF_KERNEL(long attention_scratch(const AttentionArgs& args))
TF_KERNEL(void attention_queries(const AttentionArgs& args, long b, long key_head, long begin,
                                 long end, void* scratch))

// bfloat16 and float16.
TF_KERNEL_AMX(long half_attention_scratch(const AttentionArgs& args))
TF_KERNEL_AMX(void half_attention_queries(const AttentionArgs& args, long b, long key_head,
                                          long begin, long end, void* scratch))

// float32 on bfloat16 units, by pieces (bf16_tiles.h).
TF_KERNEL_SPLIT(long split_attention_scratch(const AttentionArgs& args))
TF_KERNEL_SPLIT(void split_attention_queries(const AttentionArgs& args, long b, long key_head,
                                             long begin, long end, void* scratch))

// Few queries, as in decoding, without dropout: keys and values are read where they lie, once for
// each query. Packing them for the register tiles would cost more than it saves. All queries of a
// key head.
TF_KERNEL(long few_attention_scratch(const AttentionArgs& args))
TF_KERNEL(void few_attention_queries(const AttentionArgs& args, long b, long key_head,
                                     void* scratch))

}  // namespace tf
