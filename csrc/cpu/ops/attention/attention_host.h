// What the operators around attention share.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cpu/core/host.h"
#include "cpu/ops/attention/attention_few_kernel.h"
#include "cpu/ops/attention/attention_kernel.h"
#include "cpu/ops/attention/attention_split_kernel.h"

namespace tf {

// A mask (1 or B, 1 or H, 1 or T, 1 or S), read through its strides: bool, float32 or of `type`.
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

// `count` integers of any integer type; none without a tensor.
inline std::vector<int64_t> to_int64(const char* name, const std::optional<Tensor>& tensor,
                                     int64_t count) {
  if (!tensor) return {};
  STD_TORCH_CHECK(tensor->is_cpu() && tensor->dim() == 1 && tensor->numel() == count,
                  "attention: ", name, " must hold ", count, " integers on the CPU");
  const Tensor flat = as_contiguous(torch::stable::to(*tensor, std::optional(ScalarType::Long)));
  const auto* data = static_cast<const int64_t*>(flat.const_data_ptr());
  return {data, data + count};
}

// Items that the queries of the heads that share a key head are cut into. Each packs the keys
// again, so an item is all of them unless that leaves threads idle.
inline int64_t chunks_of(const AttentionShape& args) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t groups = args.batch * args.key_heads, heads = args.heads / args.key_heads;
  const int64_t wanted = groups >= 4 * threads || threads == 1 ? 1 : 4 * threads / groups + 1;
  return std::max<int64_t>(1, std::min(wanted, heads * args.queries / 256));
}

// See TypedAttentionArgs: threads go side by side.
inline int64_t next_head(const AttentionShape& args) {
  return chunks_of(args) == 1 ? torch::stable::get_num_threads() : 0;
}

// Calls run(batch element, key head, begin, end) for all queries, shared out between threads.
template <class Run>
void each_attention_item(const AttentionShape& args, const Run& run) {
  const int64_t groups = args.batch * args.key_heads, heads = args.heads / args.key_heads;
  const int64_t chunks = chunks_of(args);
  for_each_item(groups * chunks, [&](int64_t item) {
    // The last chunks of a causal group are the longest; they go first.
    const int64_t group = item / chunks, chunk = chunks - 1 - item % chunks;
    const int64_t queries = query_count(args, group / args.key_heads), rows = heads * queries;
    // One or two rows of a head add up in an order of their own, so none are cut off: how many
    // chunks there are depends on the threads.
    const auto cut = [&](int64_t chunk) {
      const int64_t at = rows * chunk / chunks, after = queries == 0 ? 0 : at % queries;
      return after < 3 ? at - after : queries - after < 3 ? at + queries - after : at;
    };
    const int64_t begin = cut(chunk), end = cut(chunk + 1);
    if (begin < end) run(group / args.key_heads, group % args.key_heads, begin, end);
    kernel_scratch().trim();
  });
}

// The shortest way for few queries a key head, if the call is of that kind.
inline bool run_few_attention(const TypedAttentionArgs& args) {
  // Measured; half types pay more for each query, which widens the keys again.
  const int64_t most = args.type == Element::float32 ? 4 : 2;
  // A backward works the scores out again, and large ones have to be those of the forward.
  const bool keeps = args.shift != nullptr;
  if (batch_invariant() || args.heads / args.key_heads * args.queries > most || args.dropout.on ||
      keeps || args.query_stride[3] != 1 || args.key_stride[3] != 1 || args.value_stride[3] != 1)
    return false;
  const int64_t scratch = TF_DISPATCH(few_attention_scratch, args);
  // Waking a thread takes as long as reading this many elements.
  constexpr int64_t kGrain = 16384;
  const int64_t each = (args.size + args.value_size) * args.keys * args.heads / args.key_heads;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, each));
  const int64_t groups = args.batch * args.key_heads;
  torch::stable::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group)
      TF_DISPATCH(few_attention_queries, args, group / args.key_heads, group % args.key_heads,
                  kernel_scratch().floats(scratch));
    kernel_scratch().trim();
  });
  return true;
}

// The tensor itself if its channels are adjacent.
inline Tensor with_unit_stride(const Tensor& tensor) {
  return tensor.size(3) <= 1 || tensor.stride(3) == 1 ? tensor : as_contiguous(tensor);
}

// Keys and values are packed anyway, so that pieces pay for fewer queries than rows of a product:
// times this. The backward, which works out the same scores, follows.
constexpr int64_t kPiecesFromQueries = 2;

// The same call for kernels of typed tensors.
inline TypedAttentionArgs typed(const AttentionArgs& args) {
  TypedAttentionArgs typed{};
  static_cast<AttentionShape&>(typed) = args;
  typed.type = Element::float32;
  typed.query = args.query;
  typed.key = args.key;
  typed.value = args.value;
  typed.output = args.output;
  typed.shift = args.shift;
  typed.norm = args.norm;
  typed.weights = args.weights;
  typed.dropout = args.dropout;
  typed.next_head = next_head(args);
  return typed;
}

inline void run_attention(const AttentionArgs& args) {
  if (run_few_attention(typed(args))) return;
#ifdef TF_HAVE_AMX
  if (goes_by_pieces(kPiecesFromQueries * args.queries)) {
    const TypedAttentionArgs pieces = typed(args);
    const int64_t bytes = amx::split_attention_scratch(pieces);
    each_attention_item(args, [&](int64_t b, int64_t key_head, int64_t begin, int64_t end) {
      amx::split_attention_queries(pieces, b, key_head, begin, end,
                                   kernel_scratch().floats(bytes / 4));
    });
    return;
  }
#endif
  const int64_t scratch = TF_DISPATCH(attention_scratch, args);
  each_attention_item(args, [&](int64_t b, int64_t key_head, int64_t begin, int64_t end) {
    TF_DISPATCH(attention_queries, args, b, key_head, begin, end, kernel_scratch().floats(scratch));
  });
}

}  // namespace tf
