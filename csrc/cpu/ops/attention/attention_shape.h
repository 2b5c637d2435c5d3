// What an attention call looks like, whatever the type of its elements.
#pragma once

#include <cstdint>

#include "cpu/core/element.h"

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

}  // namespace tf
