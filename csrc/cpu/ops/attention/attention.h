// Attention without the (T, S) scores in memory: softmax(scale Q K^T + mask) V by online softmax.
// With a soft cap c, c tanh(scale Q K^T / c) takes the place of the scores (Gemma 2).
// For bfloat16 and float16, scores, softmax and sums are in fp32 and rounded once; if products are
// in bfloat16, the probabilities are rounded to it, both for the product with the values and for
// the sum that divides it.
#pragma once

#include <cstdint>

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

// Strides are in elements, for (batch, head, position, channel). Ragged batches have no batch
// stride: the queries of element b are rows [query_starts[b], query_starts[b + 1]) of one packed
// sequence, its keys likewise, and `queries` and `keys` are the maximum lengths.
struct AttentionShape {
  const void* mask;             // broadcast to (B, H, T, S) by its strides, or nullptr
  const int64_t* key_lengths;   // (B) or nullptr
  const int64_t* query_starts;  // (B + 1), or nullptr: not ragged
  const int64_t* key_starts;    // both or none
  Index batch, heads, key_heads, queries, keys, size, value_size;
  Index query_stride[4], key_stride[4], value_stride[4], mask_stride[4], output_stride[3];
  float scale;
  float softcap, softcap_scale;  // 0: none; else scale / softcap, and `scale` is 1
  Element mask_type;  // boolean: bytes, nonzero = may attend; else additive, -inf = masked
  bool causal;
};

inline Index query_count(const AttentionShape& shape, Index b) {
  return shape.query_starts == nullptr ? shape.queries
                                       : shape.query_starts[b + 1] - shape.query_starts[b];
}
inline Index key_count(const AttentionShape& shape, Index b) {
  return shape.key_starts == nullptr ? shape.keys : shape.key_starts[b + 1] - shape.key_starts[b];
}

struct AttentionArgs : AttentionShape {
  Element type;       // of query, key, value, output and weights
  const void* query;  // (B, H, T, D)
  const void* key;    // (B, Hkv, S, D)
  const void* value;  // (B, Hkv, S, Dv)
  void* output;       // (B, H, T, Dv), channels adjacent
  // Saved for the backward, (B, H, T), contiguous, or nullptr: P = exp(score - row_max) / row_sum.
  // row_max is the maximum of a row's scores, or the reference used instead; both are 0 for fully
  // masked rows.
  float* row_max;
  float* row_sum;
  void* weights;        // (B, H, T, S), contiguous, after dropout, or nullptr
  Dropout dropout;      // of the probabilities; rows numbered over (B, H, T)
  Index next_head = 0;  // usual distance to the next key head of the thread; 0: unknown
};

// All queries on torch's threads.
void run_attention(AttentionArgs args);

// Forward for one kind of product.
struct AttentionKernels {
  Index (*scratch)(const AttentionArgs& args);  // in bytes
  // Queries [begin, end) of the heads that share key head `key_head` of batch element `b`, numbered
  // over (head in group, query).
  void (*queries)(const AttentionArgs& args, Index b, Index key_head, Index begin, Index end,
                  void* scratch);
};

// float32. Only here, the channels of query, key and value need not be adjacent.
TF_KERNEL(const AttentionKernels* attention_kernels())
// bfloat16 and float16, and on AMX float32 as bf16x3 (bf16_amx.h).
TF_KERNEL_AMX(const AttentionKernels* lowp_attention_kernels(Element type))

// Decoding: few queries, no dropout. Keys and values are read in place, once per query, since
// packing them for the register tiles would cost more than it saves. Processes all queries of a key
// head.
TF_KERNEL(Index decode_attention_scratch(const AttentionArgs& args))
TF_KERNEL(void decode_attention_queries(const AttentionArgs& args, Index b, Index key_head,
                                        void* scratch))

// Gradients of attention without the (T, S) probabilities in memory: they are recomputed from the
// statistics saved by the forward.
//
// Channels of query, key, value, output and grad are adjacent. Gradients that are not wanted are
// nullptr.
struct AttentionBackwardArgs : AttentionShape {
  Element type;         // of these seven and all gradients except grad_mask: float32 or bfloat16
  const void* query;    // (B, H, T, D)
  const void* key;      // (B, Hkv, S, D)
  const void* value;    // (B, Hkv, S, Dv)
  const void* output;   // (B, H, T, Dv)
  const void* grad;     // (B, H, T, Dv): of output
  const void* weights;  // (B, H, T, S), contiguous, and its gradient;
  const void* grad_weights;  // nullptr where that is absent
  const float* row_max;  // (B, H, T), contiguous, as saved by the forward; row_sum is 0 for fully
  const float* row_sum;  // masked rows
  float* delta;          // (B, H, T): sum over keys of P dP
  float dominant;        // dS of keys with a larger probability is refined
  void* grad_query;      // (B, H, T, D)
  void* grad_key;        // (B, Hkv, S, D)
  void* grad_value;      // (B, Hkv, S, Dv)
  Index grad_stride[3], grad_query_stride[3], grad_key_stride[3], grad_value_stride[3];
  Index mask_size[4];  // of the mask, where its gradient is wanted
  Dropout dropout;     // rows numbered over (B, H, T)
};

// `dominant` if the saved output is in fp32. For reduced types it is so large that few rows have
// such a key: elsewhere the error is small compared to the rounding of the output.
constexpr float kDominantInFloat = 0.5f, kDominantInLowp = 1.0f - 0x1p-5f;

// Rows [begin, end) of delta, numbered over (B, H, T).
TF_KERNEL(void attention_delta(const AttentionBackwardArgs& args, Index begin, Index end))

// Writes the sum of `parts` parts to rows [begin, end) of the group's (heads, T) in grad_query.
TF_KERNEL(void attention_backward_sum(const AttentionBackwardArgs& args, Index b, Index key_head,
                                      const float* part, Index parts, Index begin, Index end))

// Gradients for one kind of product. Sizes do not depend on the number of threads.
struct AttentionBackwardKernels {
  Index (*keys_per_tile)(const AttentionBackwardArgs& args);
  Index (*scratch)(const AttentionBackwardArgs& args);  // in bytes

  // Keys [begin, end) of key head `key_head` of batch element b, begin a multiple of
  // keys_per_tile(): writes their gradients, and their contribution to grad_query into `part`
  // (heads of the group, T, D), or, in fp32, into grad_query itself if part is nullptr. Adds their
  // contribution to the gradient of an additive mask to mask_sums, mask_size, contiguous, unless
  // nullptr. `next` is the pair, b * key_heads + key_head, whose same keys the thread probably
  // takes next, or -1; its first rows are prefetched. Returns false, with incomplete results, if an
  // operand is out of range of the products: not representable as bf16x3.
  bool (*keys)(const AttentionBackwardArgs& args, Index b, Index key_head, Index begin, Index end,
               float* part, float* mask_sums, Index next, void* scratch);
};

TF_KERNEL(const AttentionBackwardKernels* attention_backward_kernels())
// On bfloat16 units: bfloat16, where P and dS are rounded to it, and fp32 as bf16x3 on AMX
// (bf16_amx.h); sums are in fp32.
TF_KERNEL_UNITS(const AttentionBackwardKernels* bf16_attention_backward_kernels(Element type))

}  // namespace tf
