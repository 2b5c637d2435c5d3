// The operators attention_training and attention_backward.
#include <tuple>

#include "cuda/attention.cuh"
#include "cuda/attention_backward.cuh"
#include "cuda/attention_decode.cuh"
#include "cuda/operators.h"

namespace tf::cuda {
namespace {

constexpr const char* kOp = "attention";

HeadsView view_of(const Tensor& tensor, const void* data) {
  const int64_t vector = 16 / static_cast<int64_t>(tensor.element_size());
  const auto whole = [&](int64_t dim) {
    return tensor.size(dim) == 1 || tensor.stride(dim) % vector == 0;
  };
  const int64_t size = tensor.size(3);
  return {.data = data,
          .batch = tensor.stride(0),
          .head = tensor.stride(1),
          .row = tensor.stride(2),
          .column = tensor.stride(3),
          .size = static_cast<int>(size),
          .wide = aligned(data) && size % vector == 0 && (size == 1 || tensor.stride(3) == 1) &&
                  whole(0) && whole(1) && whole(2)};
}
HeadsView view_of(const Tensor& tensor) { return view_of(tensor, tensor.const_data_ptr()); }
HeadsView written(Tensor& tensor) { return view_of(tensor, tensor.mutable_data_ptr()); }

// Returns (batch, heads, rows, size) with memory order (batch, rows, heads, size), so that merging
// heads is a view.
Tensor like_heads(const Tensor& like, int64_t size) {
  const Tensor made = empty(like, {like.size(0), like.size(2), like.size(1), size});
  return torch::stable::transpose(made, 1, 2);
}

// Allocates the output with the strides of reference.empty_output().
Tensor empty_output(const Tensor& query, const Tensor& key, const Tensor& value, bool contiguous) {
  const int64_t size = value.size(3);
  const bool unit_strides = query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1;
  if (!contiguous && unit_strides && query.numel() > 0 && key.size(2) > 0) {
    if (query.size(3) == size) return torch::stable::empty_like(query);
    if (query.stride(1) < query.stride(2)) return like_heads(query, size);
  }
  return empty(query, {query.size(0), query.size(1), query.size(2), size});
}

// Allocates a gradient with heads and rows in the tensor's order in memory; empty unless `wanted`.
Tensor gradient_like(const Tensor& tensor, bool wanted) {
  if (!wanted) return empty(tensor, {0});
  return tensor.stride(1) < tensor.stride(2) ? like_heads(tensor, tensor.size(3))
                                             : empty_contiguous(tensor);
}

MaskType mask_type_of(const Tensor& mask, const Tensor& query) {
  const ScalarType type = mask.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::Bool || type == ScalarType::Float || type == query.scalar_type(), kOp,
      ": attn_mask must be bool, float32 or of the dtype of query");
  return type == ScalarType::Bool    ? MaskType::boolean
         : type == ScalarType::Float ? MaskType::float32
                                     : MaskType::like_query;
}

// Returns the arguments that forward and backward have in common, without row_max and row_sum.
AttentionArgs describe(const Tensor& query, const Tensor& key, const Tensor& value,
                       const std::optional<Tensor>& mask, const std::optional<Tensor>& lengths,
                       bool causal, double scale, double dropout_p,
                       const std::optional<Tensor>& seed) {
  AttentionArgs args{};
  args.type = element_of(kOp, query);
  check_like(kOp, "key", key, query);
  check_like(kOp, "value", value, query);
  const bool fits = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                    key.size(0) == query.size(0) && value.size(0) == query.size(0) &&
                    key.size(3) == query.size(3) && value.size(1) == key.size(1) &&
                    value.size(2) == key.size(2) && key.size(1) > 0 &&
                    query.size(1) % key.size(1) == 0;
  STD_TORCH_CHECK(fits, kOp,
                  ": query must be (batch, heads, queries, size), key (batch, key heads, keys, "
                  "size), value (batch, key heads, keys, any)");
  STD_TORCH_CHECK(query.size(3) <= kLargestHead && value.size(3) <= kLargestHead, kOp,
                  ": head sizes go up to ", kLargestHead);
  const int64_t heads = query.size(1), queries = query.size(2), keys = key.size(2);
  check_rows(kOp, queries);
  check_rows(kOp, keys);
  check_rows(kOp, query.size(0) * heads * (ceil_div(queries, 64) + ceil_div(keys, 64)));
  args.query = view_of(query), args.key = view_of(key), args.value = view_of(value);
  args.batch = static_cast<int>(query.size(0)), args.heads = static_cast<int>(heads);
  args.group = static_cast<int>(heads / key.size(1));
  args.queries = static_cast<int>(queries), args.keys = static_cast<int>(keys);
  args.mask_type = MaskType::none;
  if (mask) {
    args.mask_type = mask_type_of(*mask, query);
    args.mask = mask->const_data_ptr();
    STD_TORCH_CHECK(mask->dim() <= 4 && mask->get_device() == query.get_device(), kOp,
                    ": attn_mask must be broadcastable to (batch, heads, queries, keys), on the "
                    "device of query");
    int64_t* const strides[] = {&args.mask_batch, &args.mask_head, &args.mask_row,
                                &args.mask_column};
    const int64_t sizes[] = {query.size(0), heads, queries, keys};
    for (int64_t d = 0; d < mask->dim(); ++d) {
      const int64_t at = 4 - mask->dim() + d, size = mask->size(d);
      STD_TORCH_CHECK(size == 1 || size == sizes[at], kOp, ": attn_mask has ", size,
                      " elements where ", sizes[at], " are needed");
      if (size != 1) *strides[at] = mask->stride(d) * static_cast<int64_t>(mask->element_size());
    }
  }
  if (lengths) {
    const bool is_long = lengths->scalar_type() == ScalarType::Long;
    STD_TORCH_CHECK((is_long || lengths->scalar_type() == ScalarType::Int) && lengths->dim() == 1 &&
                        lengths->size(0) == query.size(0) &&
                        lengths->get_device() == query.get_device(),
                    kOp,
                    ": key_lengths must be one int32 or int64 for each sequence, on the "
                    "device of query");
    args.lengths = lengths->const_data_ptr();
    args.length_stride = lengths->stride(0);
    args.long_lengths = is_long;
  }
  constexpr double kLog2E = 1.4426950408889634;
  args.causal = causal;
  const bool adds = mask && args.mask_type != MaskType::boolean;
  // Unscaled scores need a positive scale, since their maximum is subtracted, of at least 2^-64;
  // below that, differences of scores times the scale would be near the smallest fp32 numbers.
  args.scaled = adds || !(scale >= 0x1p-64);
  args.scale = static_cast<float>(scale);
  args.exponent = static_cast<float>(args.scaled ? kLog2E : scale * kLog2E);
  args.dropout = make_dropout(kOp, dropout_p, seed, query);
  return args;
}

// Calls with query lengths or packed sequences are decomposed into other calls by the caller.
void check_no_query_lengths(const std::optional<Tensor>& query_lengths, int64_t longest_queries,
                            int64_t longest_keys) {
  STD_TORCH_CHECK(!query_lengths && longest_queries < 0 && longest_keys < 0, kOp,
                  ": this backend has no kernel for query lengths");
}

// Converts lengths to a dtype that kernels support: int32 or int64.
std::optional<Tensor> readable(const std::optional<Tensor>& lengths) {
  if (!lengths) return lengths;
  const ScalarType type = lengths->scalar_type();
  if (type != ScalarType::Byte && type != ScalarType::Char && type != ScalarType::Short)
    return lengths;
  return torch::stable::to(*lengths, ScalarType::Long);
}

// Returns (output; weights, empty unless needed; row_max and row_sum, saved for backward).
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_training(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask,
    std::optional<Tensor> lengths, bool causal, double scale, double dropout_p,
    std::optional<Tensor> seed, bool need_weights, std::optional<Tensor> query_lengths,
    int64_t longest_queries, int64_t longest_keys, bool contiguous) {
  check_no_query_lengths(query_lengths, longest_queries, longest_keys);
  lengths = readable(lengths);
  AttentionForwardArgs args{};
  args.call = describe(query, key, value, mask, lengths, causal, scale, dropout_p, seed);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  Tensor output = empty_output(query, key, value, contiguous);
  Tensor weights =
      need_weights ? empty(query, {batch, heads, queries, key.size(2)}) : empty(query, {0});
  Tensor row_max = empty(query, {batch, heads, queries}, ScalarType::Float);
  Tensor row_sum = empty(query, {batch, heads, queries}, ScalarType::Float);
  args.output = written(output);
  if (need_weights) args.weights = weights.mutable_data_ptr();
  args.call.row_max = static_cast<float*>(row_max.mutable_data_ptr());
  args.call.row_sum = static_cast<float*>(row_sum.mutable_data_ptr());
  const OnDevice device(query);
  if (!decodes(args)) {
    launch_attention(args, device.stream);
    return {output, weights, row_max, row_sum};
  }
  AttentionDecodeArgs decode{.forward = args,
                             .splits = decode_splits(args.call),
                             .sums = nullptr,
                             .maxima = nullptr,
                             .totals = nullptr};
  std::optional<Tensor> shares;
  if (decode.splits > 1) {
    const int64_t count = batch * heads * decode.splits;
    shares = empty(query, {count * (value.size(3) + 2)}, ScalarType::Float);
    decode.maxima = static_cast<float*>(shares->mutable_data_ptr());
    decode.totals = decode.maxima + count;
    decode.sums = decode.totals + count;
  }
  launch_attention_decode(decode, device.stream);
  return {output, weights, row_max, row_sum};
}

float* statistic(const char* name, const Tensor& tensor, const Tensor& query) {
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.dim() == 3 &&
                      tensor.numel() == query.size(0) * query.size(1) * query.size(2) &&
                      tensor.scalar_type() == ScalarType::Float &&
                      tensor.get_device() == query.get_device(),
                  kOp, ": ", name, " must be a result of the forward");
  return const_cast<float*>(static_cast<const float*>(tensor.const_data_ptr()));
}

// Sums dS (batch, heads, queries, keys) to the shape of the mask.
Tensor sum_to(const Tensor& scores, const Tensor& mask) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < 4; ++d) {
    const int64_t own = d - (4 - mask.dim());
    if (own < 0 || (mask.size(own) == 1 && scores.size(d) != 1)) dims.push_back(d);
  }
  const Tensor summed = torch::stable::sum(scores, IntHeaderOnlyArrayRef(dims.data(), dims.size()),
                                           true, mask.scalar_type());
  return torch::stable::view(summed, mask.sizes());
}

// Returns the gradients of query, key, value and mask; empty if not requested.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad, std::optional<Tensor> grad_weights, Tensor query, Tensor key, Tensor value,
    std::optional<Tensor> mask, std::optional<Tensor> lengths, bool causal, double scale,
    double dropout_p, std::optional<Tensor> seed, Tensor, std::optional<Tensor>, Tensor row_max,
    Tensor row_sum, bool want_query, bool want_key, bool want_value, bool want_mask,
    std::optional<Tensor> query_lengths, int64_t longest_queries, int64_t longest_keys) {
  check_no_query_lengths(query_lengths, longest_queries, longest_keys);
  lengths = readable(lengths);
  AttentionBackwardArgs args{};
  args.call = describe(query, key, value, mask, lengths, causal, scale, dropout_p, seed);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  const int64_t keys = key.size(2);
  args.call.row_max = statistic("row_max", row_max, query);
  args.call.row_sum = statistic("row_sum", row_sum, query);
  check_like(kOp, "grad", grad, query);
  STD_TORCH_CHECK(grad.dim() == 4 && grad.size(0) == batch && grad.size(1) == heads &&
                      grad.size(2) == queries && grad.size(3) == value.size(3),
                  kOp, ": grad must have the shape of the output");
  args.grad = view_of(grad);
  if (grad_weights) {
    check_like(kOp, "grad_weights", *grad_weights, query);
    STD_TORCH_CHECK(grad_weights->numel() == batch * heads * queries * keys, kOp,
                    ": grad_weights must have the shape of the weights");
    grad_weights = as_contiguous(*grad_weights);
    args.grad_weights = grad_weights->const_data_ptr();
  }
  Tensor grad_query = gradient_like(query, want_query);
  Tensor grad_key = gradient_like(key, want_key), grad_value = gradient_like(value, want_value);
  if (want_query) args.grad_query = written(grad_query);
  if (want_key) args.grad_key = written(grad_key);
  if (want_value) args.grad_value = written(grad_value);
  Tensor delta = empty(query, {batch, heads, queries}, ScalarType::Float);
  args.delta = static_cast<float*>(delta.mutable_data_ptr());
  Tensor scores = empty(query, {0});
  bool sums = false;
  if (want_mask) {
    STD_TORCH_CHECK(mask && args.call.mask_type != MaskType::boolean, kOp,
                    ": a bool mask has no gradient");
    sums = mask->numel() != batch * heads * queries * keys;
    // fp32 if it will be summed, so that it is rounded once, after the sum.
    scores =
        empty(query, {batch, heads, queries, keys}, sums ? ScalarType::Float : mask->scalar_type());
    args.grad_scores = scores.mutable_data_ptr();
    args.grad_scores_float = sums || args.call.mask_type == MaskType::float32;
  }
  const OnDevice device(query);
  launch_attention_backward(args, device.stream);
  if (sums)
    scores = sum_to(scores, *mask);
  else if (want_mask)
    scores = torch::stable::view(scores, mask->sizes());
  return {grad_query, grad_key, grad_value, scores};
}

}  // namespace
}  // namespace tf::cuda

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, TF_DISPATCH_KEY, m) {
  m.impl("attention_training.cuda", TORCH_BOX(&tf::cuda::attention_training));
  m.impl("attention_backward.cuda", TORCH_BOX(&tf::cuda::attention_backward));
}
