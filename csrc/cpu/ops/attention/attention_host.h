// Helpers of the operators that contain attention.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cpu/core/host.h"
#include "cpu/ops/attention/attention.h"

namespace tf {

// Sets a mask (1 or B, 1 or H, 1 or T, 1 or S), read through its strides: bool, float32 or `type`.
inline void set_mask(AttentionShape& args, const std::optional<Tensor>& mask,
                     const std::array<int64_t, 4>& sizes, ScalarType type = ScalarType::Float) {
  if (!mask) return;
  const ScalarType given = mask->scalar_type();
  STD_TORCH_CHECK(
      mask->is_cpu() && (given == ScalarType::Bool || given == ScalarType::Float || given == type),
      "attention: mask must be bool, float32 or of query's dtype, and on the CPU");
  STD_TORCH_CHECK(mask->dim() == 4, "attention: mask must have 4 dimensions");
  for (int d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(mask->size(d) == sizes[d] || mask->size(d) == 1,
                    "attention: mask does not broadcast to the scores");
    args.mask_stride[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
  }
  args.mask = mask->const_data_ptr();
  args.mask_type = given == ScalarType::Bool       ? Element::boolean
                   : given == ScalarType::BFloat16 ? Element::bfloat16
                   : given == ScalarType::Half     ? Element::float16
                                                   : Element::float32;
}

// Converts `count` integers of any integer type; empty without a tensor.
inline std::vector<int64_t> to_int64(const char* name, const std::optional<Tensor>& tensor,
                                     int64_t count) {
  if (!tensor) return {};
  STD_TORCH_CHECK(tensor->is_cpu() && tensor->dim() == 1 && tensor->numel() == count,
                  "attention: ", name, " must hold ", count, " integers on the CPU");
  const Tensor flat = as_contiguous(torch::stable::to(*tensor, std::optional(ScalarType::Long)));
  const auto* data = static_cast<const int64_t*>(flat.const_data_ptr());
  return {data, data + count};
}

template <int kDims>
void set_strides(Index (&strides)[kDims], const Tensor& tensor) {
  for (int d = 0; d < kDims; ++d) strides[d] = tensor.stride(d);
}

// The sequences of a batch of one, (1, H, rows, size), of which each attends to its own keys. Query
// lengths without packed sequences are composed of other operators.
struct PackedSequences {
  PackedSequences(const std::optional<Tensor>& query_starts, int64_t longest_queries,
                  int64_t longest_keys)
      : query_starts(query_starts), longest_queries(longest_queries), longest_keys(longest_keys) {
    STD_TORCH_CHECK(query_starts.has_value() == (longest_queries >= 0) &&
                        (longest_queries >= 0) == (longest_keys >= 0),
                    "attention: this backend has no kernel for query lengths");
  }

  explicit operator bool() const { return query_starts.has_value(); }
  int64_t batch(const Tensor& query) const {
    return query_starts ? query_starts->numel() - 1 : query.size(0);
  }
  int64_t queries(const Tensor& query) const {
    return query_starts ? longest_queries : query.size(2);
  }

  std::optional<Tensor> query_starts;  // (B + 1)
  int64_t longest_queries, longest_keys;
};

// Reads the starts (B + 1) of sequences in `rows` rows.
inline std::vector<int64_t> read_starts(const std::optional<Tensor>& starts, int64_t rows,
                                        int64_t longest) {
  std::vector<int64_t> found = to_int64("starts", starts, starts ? starts->numel() : 0);
  STD_TORCH_CHECK(found.size() > 0 && found[0] == 0 && found.back() <= rows,
                  "attention: starts must go from 0 to ", rows, ", the number of rows");
  for (size_t i = 0; i + 1 < found.size(); ++i) {
    STD_TORCH_CHECK(found[i] <= found[i + 1], "attention: starts must not fall");
    STD_TORCH_CHECK(found[i + 1] - found[i] <= longest,
                    "attention: sequences are longer than said");
  }
  return found;
}

// False if rows belong to no sequence, or a sequence is empty.
inline bool covers(const std::vector<int64_t>& starts, int64_t rows) {
  return starts.back() == rows && std::adjacent_find(starts.begin(), starts.end()) == starts.end();
}

// Kept while the call's shape refers to them.
struct Lengths {
  std::vector<int64_t> keys, query_starts, key_starts;
  bool cover = true;  // see covers()
};

// Sets the shape of a call on (B, H, length, size) tensors, its mask and its key lengths, which are
// kept in `lengths`.
inline void set_shape(AttentionShape& args, const Tensor& query, const Tensor& key,
                      const Tensor& value, const std::optional<Tensor>& mask,
                      const std::optional<Tensor>& key_lengths, bool is_causal, double scale,
                      const PackedSequences& packed, Lengths& lengths) {
  args.batch = query.size(0);
  args.heads = query.size(1);
  args.queries = query.size(2);
  args.size = query.size(3);
  args.key_heads = key.size(1);
  args.keys = key.size(2);
  args.value_size = value.size(3);
  args.scale = static_cast<float>(scale);
  args.causal = is_causal;
  set_strides(args.query_stride, query);
  set_strides(args.key_stride, key);
  set_strides(args.value_stride, value);
  set_mask(args, mask, {args.batch, args.heads, args.queries, args.keys}, query.scalar_type());
  if (packed) {
    STD_TORCH_CHECK(!mask && args.batch == 1, "attention: packed sequences have no mask");
    lengths.query_starts = read_starts(packed.query_starts, args.queries, packed.longest_queries);
    lengths.key_starts = read_starts(key_lengths, args.keys, packed.longest_keys);
    lengths.cover =
        covers(lengths.query_starts, args.queries) && covers(lengths.key_starts, args.keys);
    STD_TORCH_CHECK(lengths.query_starts.size() == lengths.key_starts.size(),
                    "attention: starts come in pairs");
    args.query_starts = lengths.query_starts.data();
    args.key_starts = lengths.key_starts.data();
    args.batch = packed.batch(query);
    args.queries = packed.longest_queries;
    args.keys = packed.longest_keys;
    return;
  }
  lengths.keys = to_int64("key_lengths", key_lengths, args.batch);
  if (key_lengths) args.key_lengths = lengths.keys.data();
}

// Returns the tensor itself if its channels are adjacent, else a contiguous copy.
inline Tensor with_unit_stride(const Tensor& tensor) {
  return tensor.size(3) <= 1 || tensor.stride(3) == 1 ? tensor : as_contiguous(tensor);
}

// A query counts as this many rows of a product when choosing bf16x3: keys and values are packed
// anyway, so it pays for fewer queries. The backward uses the same rule, since it recomputes the
// same scores.
constexpr int64_t kBf16x3RowsPerQuery = 2;

}  // namespace tf
