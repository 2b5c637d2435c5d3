// Operator attention_backward.
#include <atomic>
#include <tuple>

#include "cpu/core/host.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_host.h"

namespace tf {
namespace {

const char* const kOp = "attention_backward";

const float* data_of(const Tensor& tensor) {
  return static_cast<const float*>(tensor.const_data_ptr());
}

Tensor checked(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes,
               ScalarType type = ScalarType::Float) {
  check_type(kOp, name, tensor, type, "query");
  STD_TORCH_CHECK(
      tensor.sizes().equals(torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size())),
      kOp, ": ", name, " has another shape than the other arguments ask for");
  return tensor;
}

// A gradient with the tensor's order of heads and positions in memory, or an empty one.
Tensor gradient_like(const Tensor& tensor, bool wanted) {
  if (!wanted) return empty_tensor(tensor, {0});
  const int64_t b = tensor.size(0), h = tensor.size(1), t = tensor.size(2), d = tensor.size(3);
  if (tensor.stride(1) < tensor.stride(2))
    return torch::stable::transpose(empty_tensor(tensor, {b, t, h, d}), 1, 2);
  return empty_tensor(tensor, {b, h, t, d});
}

void* set_gradient(Tensor& tensor, bool wanted, long (&strides)[3]) {
  if (!wanted) return nullptr;
  set_strides(strides, tensor);
  return tensor.mutable_data_ptr();
}

// Number of parts that the keys of a group are divided into, each with its own sum for grad_query.
// Depends on the shape only, and so does the order of summation.
int64_t key_parts(const AttentionBackwardArgs& args, int64_t tiles) {
  constexpr int64_t kItems = 32, kMaxParts = 8;
  const int64_t groups = args.batch * args.key_heads;
  return std::clamp<int64_t>((kItems + groups - 1) / groups, 1, std::min(tiles, kMaxParts));
}

// Like for_each_item(), but stops and returns false once an f(item) returns false.
template <class F>
bool all_items(int64_t items, const F& f) {
  std::atomic<bool> did{true};
  for_each_item(items, [&](int64_t item) {
    if (!did.load(std::memory_order_relaxed)) return;
    if (!f(item)) did.store(false, std::memory_order_relaxed);
    kernel_scratch().trim();
  });
  return did;
}

// Gradients of query, key and value; returns false if an operand is out of range of the products.
bool run_keys(const AttentionBackwardArgs& args, const AttentionBackwardKernels& kernels) {
  const int64_t step = kernels.keys_per_tile(args), scratch = kernels.scratch(args);
  const int64_t tiles = (args.keys + step - 1) / step, groups = args.batch * args.key_heads;
  const int64_t heads = args.heads / args.key_heads, parts = key_parts(args, tiles);
  const int64_t part_size = heads * args.queries * args.size;
  // Sums are in fp32: reduced types always use a part.
  const bool split = (parts > 1 || args.type != Element::float32) && args.grad_query != nullptr;
  float* sums = split ? shared_scratch(1).floats(groups * parts * part_size) : nullptr;
  const bool did = all_items(groups * parts, [&](int64_t item) {
    // With causal masking the first keys have the most queries; they are scheduled first.
    const int64_t part = item / groups, group = item % groups;
    return kernels.keys(args, group / args.key_heads, group % args.key_heads,
                        tiles * part / parts * step, tiles * (part + 1) / parts * step,
                        split ? sums + (group * parts + part) * part_size : nullptr,
                        bytes_of(kernel_scratch(), scratch));
  });
  if (!did || !split) return did;
  const int64_t rows = heads * args.queries, blocks = (rows + 255) / 256;
  for_each_item(groups * blocks, [&](int64_t item) {
    const int64_t group = item / blocks, block = item % blocks;
    TF_DISPATCH(attention_backward_sum, args, group / args.key_heads, group % args.key_heads,
                sums + group * parts * part_size, parts, rows * block / blocks,
                rows * (block + 1) / blocks);
  });
  return true;
}

// Gradient of the mask; returns false as run_keys() does. Each item owns its part of the result: it
// recomputes the scores and sums over the broadcast dimensions.
bool run_mask(AttentionBackwardArgs args, const AttentionBackwardKernels& kernels,
              Tensor& grad_mask) {
  args.grad_query = args.grad_key = args.grad_value = nullptr;
  torch::stable::zero_(grad_mask);
  const int64_t step = kernels.keys_per_tile(args), block = kernels.queries_per_block(args);
  const int64_t scratch = kernels.scratch(args);
  constexpr int64_t kBlocks = 4;  // of queries, per item
  const int64_t tiles = args.mask_size[3] > 1 ? (args.keys + step - 1) / step : 1;
  const int64_t blocks = (args.queries + block - 1) / block;
  const int64_t chunks = args.mask_size[2] > 1 ? (blocks + kBlocks - 1) / kBlocks : 1;
  const int64_t per_chunk = args.mask_size[2] > 1 ? kBlocks : blocks;
  return all_items(args.mask_size[0] * args.mask_size[1] * tiles * chunks, [&](int64_t item) {
    const int64_t chunk = item % chunks, tile = item / chunks % tiles;
    const int64_t head = item / chunks / tiles;
    return kernels.mask(args, head / args.mask_size[1], head % args.mask_size[1], tile,
                        chunk * per_chunk, (chunk + 1) * per_chunk,
                        bytes_of(kernel_scratch(), scratch));
  });
}

// Whether there is a kernel for bfloat16 without conversion to fp32.
bool has_bf16_kernel(const Tensor& query) {
#if TF_HAVE_UNITS
  constexpr int64_t kMinQueries = 16;
  const Isa isa = current_isa();
  return query.scalar_type() == ScalarType::BFloat16 &&
         (isa == Isa::amx || isa == Isa::avx512_bf16) && query.size(2) >= kMinQueries;
#else
  return false;
#endif
}

// Calls run(kernels) with the kernels for the call; returns false if bfloat16 must be converted to
// float32.
template <class Run>
bool with_kernels(const AttentionBackwardArgs& args, const Run& run) {
#if TF_HAVE_UNITS
  const bool reduced_float = args.type != Element::float32;
  if (reduced_float || uses_bf16x3(kBf16x3RowsPerQuery * args.queries)) {
    const bool did = run(*TF_DISPATCH_UNITS(bf16_attention_backward_kernels, args.type));
    if (did || reduced_float) return did;
  }
#endif
  return run(*TF_DISPATCH(attention_backward_kernels, ));
}

// A copy in float32, with the tensor's order of heads and positions in memory.
Tensor widened(const Tensor& tensor) {
  const int64_t b = tensor.size(0), h = tensor.size(1), t = tensor.size(2), d = tensor.size(3);
  Tensor copy = tensor.stride(1) < tensor.stride(2)
                    ? torch::stable::transpose(empty_float_tensor(tensor, {b, t, h, d}), 1, 2)
                    : empty_float_tensor(tensor, {b, h, t, d});
  return torch::stable::copy_(copy, tensor);
}

std::optional<Tensor> in_float(const std::optional<Tensor>& tensor) {
  if (!tensor || !is_reduced_float(*tensor)) return tensor;
  return widened(*tensor);
}

// Converts a gradient to `like`'s type.
Tensor narrowed(const Tensor& gradient, const Tensor& like, bool wanted) {
  Tensor copy = gradient_like(like, wanted);
  return wanted ? torch::stable::copy_(copy, gradient) : copy;
}

// See attention_backward(); `dominant` depends on the type of the saved output.
std::tuple<Tensor, Tensor, Tensor, Tensor> gradients(
    Tensor grad, std::optional<Tensor> grad_weights, Tensor query, Tensor key, Tensor value,
    std::optional<Tensor> mask, std::optional<Tensor> key_lengths, bool is_causal, double scale,
    double dropout_p, std::optional<Tensor> seed, Tensor output, std::optional<Tensor> weights,
    Tensor shift, Tensor norm, bool want_query, bool want_key, bool want_value, bool want_mask,
    float dominant) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, kOp,
                  ": query, key and value must be (B, H, length, size)");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2),
                size = query.size(3), keys = key.size(2), value_size = value.size(3),
                key_heads = key.size(1);
  STD_TORCH_CHECK(heads == key_heads || (key_heads > 0 && heads % key_heads == 0), kOp,
                  ": the number of query heads must be a multiple of that of key heads");
  const bool reduced_float = is_reduced_float(query);
  const ScalarType type = reduced_float ? query.scalar_type() : ScalarType::Float;
  query = with_unit_stride(checked("query", query, {batch, heads, queries, size}, type));
  key = with_unit_stride(checked("key", key, {batch, key_heads, keys, size}, type));
  value = with_unit_stride(checked("value", value, {batch, key_heads, keys, value_size}, type));
  grad = with_unit_stride(checked("grad", grad, {batch, heads, queries, value_size}, type));
  output = with_unit_stride(checked("output", output, {batch, heads, queries, value_size}, type));
  shift = as_contiguous(checked("shift", shift, {batch, heads, queries}));
  norm = as_contiguous(checked("norm", norm, {batch, heads, queries}));
  // The sums for a mask are in fp32.
  const auto mask_like = [&](const Tensor& sums) {
    if (!want_mask || sums.scalar_type() == mask->scalar_type()) return sums;
    Tensor rounded = empty_tensor(*mask, mask->sizes());
    return torch::stable::copy_(rounded, sums);
  };
  const auto all_in_float = [&] {
    auto [dquery, dkey, dvalue, dmask] =
        gradients(widened(grad), in_float(grad_weights), widened(query), widened(key),
                  widened(value), in_float(mask), key_lengths, is_causal, scale, dropout_p, seed,
                  widened(output), in_float(weights), shift, norm, want_query, want_key, want_value,
                  want_mask, grad_weights ? kDominantInFloat : dominant);
    return std::tuple(narrowed(dquery, query, want_query), narrowed(dkey, key, want_key),
                      narrowed(dvalue, value, want_value),
                      want_mask ? mask_like(dmask) : empty_tensor(query, {0}));
  };
  // Gradients of returned probabilities are implemented for float32 only.
  if (reduced_float && (grad_weights || !has_bf16_kernel(query))) return all_in_float();
  AttentionBackwardArgs args{};
  args.type = element_of(query);
  args.dominant = dominant;
  if (grad_weights) {
    STD_TORCH_CHECK(weights.has_value(), kOp, ": grad_weights needs weights");
    for (auto [name, tensor] :
         {std::pair("weights", &weights), std::pair("grad_weights", &grad_weights)})
      *tensor = as_contiguous(checked(name, **tensor, {batch, heads, queries, keys}));
    args.weights = data_of(*weights);
    args.grad_weights = data_of(*grad_weights);
  }
  std::vector<int64_t> lengths;
  set_shape(args, query, key, value, mask, key_lengths, is_causal, scale, lengths);
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.output = output.const_data_ptr();
  args.grad = grad.const_data_ptr();
  args.shift = data_of(shift);
  args.norm = data_of(norm);
  set_strides(args.output_stride, output);
  set_strides(args.grad_stride, grad);
  args.dropout = make_dropout(kOp, dropout_p, seed);
  Tensor grad_query = gradient_like(query, want_query), grad_key = gradient_like(key, want_key);
  Tensor grad_value = gradient_like(value, want_value);
  args.grad_query = set_gradient(grad_query, want_query, args.grad_query_stride);
  args.grad_key = set_gradient(grad_key, want_key, args.grad_key_stride);
  args.grad_value = set_gradient(grad_value, want_value, args.grad_value_stride);
  Tensor grad_mask = empty_tensor(query, {0});
  if (want_mask) {
    STD_TORCH_CHECK(mask.has_value() && mask->scalar_type() != ScalarType::Bool, kOp,
                    ": only a float mask has a gradient");
    grad_mask = empty_tensor(*mask, mask->sizes(), true);
    for (int d = 0; d < 4; ++d) args.mask_size[d] = mask->size(d);
    args.grad_mask = static_cast<float*>(grad_mask.mutable_data_ptr());
  }
  if (batch * heads * queries == 0 || keys == 0) {
    for (Tensor* tensor : {&grad_query, &grad_key, &grad_value, &grad_mask})
      torch::stable::zero_(*tensor);
    return {grad_query, grad_key, grad_value, mask_like(grad_mask)};
  }
  const int64_t rows = batch * heads * queries;
  args.delta = shared_scratch(0).floats(rows);
  torch::stable::parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    TF_DISPATCH(attention_delta, args, begin, end);
  });
  const auto keys_in = [&](const auto& kernels) { return run_keys(args, kernels); };
  const auto mask_in = [&](const auto& kernels) { return run_mask(args, kernels, grad_mask); };
  if ((want_query || want_key || want_value) && !with_kernels(args, keys_in)) return all_in_float();
  if (want_mask && !with_kernels(args, mask_in)) return all_in_float();
  trim_shared_scratch();
  return {grad_query, grad_key, grad_value, mask_like(grad_mask)};
}

// Gradients of query, key, value and mask; empty where not wanted. weights and grad_weights go
// together: the probabilities returned by the forward and their gradient.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad, std::optional<Tensor> grad_weights, Tensor query, Tensor key, Tensor value,
    std::optional<Tensor> mask, std::optional<Tensor> key_lengths, bool is_causal, double scale,
    double dropout_p, std::optional<Tensor> seed, Tensor output, std::optional<Tensor> weights,
    Tensor row_max, Tensor row_sum, bool want_query, bool want_key, bool want_value, bool want_mask,
    std::optional<Tensor> query_lengths, int64_t longest_queries, int64_t longest_keys) {
  check_no_query_lengths(kOp, query_lengths, longest_queries, longest_keys);
  const float dominant = is_reduced_float(output) ? kDominantInLowp : kDominantInFloat;
  return gradients(grad, grad_weights, query, key, value, mask, key_lengths, is_causal, scale,
                   dropout_p, seed, output, weights, row_max, row_sum, want_query, want_key,
                   want_value, want_mask, dominant);
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("attention_backward.cpu", TF_BOX(&tf::attention_backward));
}
