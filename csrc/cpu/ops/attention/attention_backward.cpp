// Operator attention_backward.
#include <atomic>
#include <tuple>

#include "cpu/core/host.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_host.h"
#include "kernel_table.h"

namespace tf {
namespace {

const char* const kOp = "attention_backward";

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

void* set_gradient(Tensor& tensor, bool wanted, Index (&strides)[3]) {
  if (!wanted) return nullptr;
  set_strides(strides, tensor);
  return tensor.mutable_data_ptr();
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

// How the work is divided into items. Depends on the shape only, and so does the order of
// summation. An owner is a set of pairs (batch element, key head) that add to the same part of the
// mask's gradient, or a single pair without such a gradient. Items divide the pairs of an owner
// into chunks, and the keys of a pair into parts. Each part has its own sum for grad_query, each
// chunk for the mask's gradient.
struct Division {
  int64_t step, tiles, owners_across, owners, pairs_across, pairs, parts, chunks, mask_sums = 0;

  Division(const AttentionBackwardArgs& args, bool want_mask, int64_t keys_per_tile)
      : step(keys_per_tile), tiles((args.keys + step - 1) / step) {
    constexpr int64_t kItems = 32, kMaxParts = 8;
    const Index* size = args.mask_size;
    pairs_across = want_mask && size[1] == 1 ? args.key_heads : 1;
    pairs = (want_mask && size[0] == 1 ? args.batch : 1) * pairs_across;
    owners_across = args.key_heads / pairs_across;
    owners = args.batch * args.key_heads / pairs;
    parts = std::clamp<int64_t>((kItems + owners - 1) / owners, 1, std::min(tiles, kMaxParts));
    chunks = 1;
    if (!want_mask) return;
    // The partial sums may take as much memory as two masks plus grad_query.
    const int64_t mask_elements = size[0] * size[1] * size[2] * size[3];
    const int64_t affordable =
        2 + args.batch * args.heads * args.queries * args.size / mask_elements;
    const int64_t wanted = (kItems + owners * parts - 1) / (owners * parts);
    chunks = std::clamp<int64_t>(wanted, 1, std::min(pairs, affordable));
    mask_sums = chunks * (size[3] == 1 ? parts : 1);
  }
};

// All gradients; returns false if an operand is out of range of the products.
bool run(const AttentionBackwardArgs& args, const AttentionBackwardKernels& kernels,
         float* grad_mask) {
  const Division division(args, grad_mask != nullptr, kernels.keys_per_tile(args));
  const auto& [step, tiles, owners_across, owners, pairs_across, pairs, parts, chunks, mask_sums] =
      division;
  const int64_t scratch = kernels.scratch(args);
  const int64_t groups = args.batch * args.key_heads, heads = args.heads / args.key_heads;
  const int64_t rows = heads * args.queries, part_size = rows * args.size;
  // Sums are in fp32: reduced types always use a part.
  const bool split = (parts > 1 || args.type != Element::float32) && args.grad_query != nullptr;
  float* sums = split ? shared_scratch(1).floats(groups * parts * part_size) : nullptr;
  const Index* size = args.mask_size;
  const int64_t mask_elements = size[0] * size[1] * size[2] * size[3];
  float* masks = mask_sums > 1 ? shared_scratch(2).floats(mask_sums * mask_elements) : grad_mask;
  // Where one part reads all rows of a head, it computes their delta, and they stay in cache.
  if (parts > 1)
    parallel_for(0, groups * rows, 256, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(attention_delta, args, begin, end);
    });
  const bool did = all_items(owners * chunks * parts, [&](int64_t item) {
    // With causal masking the first keys have the most queries; they are scheduled first.
    const int64_t part = item / (owners * chunks), chunk = item / owners % chunks;
    const int64_t owner = item % owners, begin = tiles * part / parts * step;
    const int64_t end = tiles * (part + 1) / parts * step;
    const int64_t first_b = owner / owners_across, first_head = owner % owners_across;
    float* mask = nullptr;
    if (masks != nullptr) {
      mask = masks + (size[3] == 1 ? chunk * parts + part : chunk) * mask_elements;
      // Cleared here: most of it will be in cache when it is added to.
      const int64_t mask_heads = size[1] == 1 ? 1 : heads;
      const int64_t from = size[3] == 1 ? 0 : begin;
      const int64_t columns = size[3] == 1 ? 1 : std::min<int64_t>(end, size[3]) - begin;
      float* row =
          mask +
          ((size[0] == 1 ? 0 : first_b) * size[1] + (size[1] == 1 ? 0 : first_head * heads)) *
              size[2] * size[3] +
          from;
      for (int64_t i = 0; i < mask_heads * size[2]; ++i, row += size[3])
        std::fill_n(row, columns, 0.0f);
    }
    const int64_t last = pairs * (chunk + 1) / chunks;
    for (int64_t pair = pairs * chunk / chunks; pair < last; ++pair) {
      const auto group_of = [&](int64_t i) {
        return (first_b + i / pairs_across) * args.key_heads + first_head + i % pairs_across;
      };
      const int64_t group = group_of(pair), after = group + torch::stable::get_num_threads();
      const int64_t next = pair + 1 < last                ? group_of(pair + 1)
                           : pairs == 1 && after < groups ? after
                                                          : -1;
      if (parts == 1) TF_DISPATCH(attention_delta, args, group * rows, (group + 1) * rows);
      if (!kernels.keys(args, group / args.key_heads, group % args.key_heads, begin, end,
                        split ? sums + (group * parts + part) * part_size : nullptr, mask, next,
                        bytes_of(kernel_scratch(), scratch)))
        return false;
    }
    return true;
  });
  if (!did) return false;
  if (mask_sums > 1)
    parallel_for(0, mask_elements, 4096, [&](int64_t begin, int64_t end) {
      std::copy(masks + begin, masks + end, grad_mask + begin);
      for (int64_t i = 1; i < mask_sums; ++i)
        for (int64_t j = begin; j < end; ++j) grad_mask[j] += masks[i * mask_elements + j];
    });
  if (!split) return true;
  const int64_t blocks = (rows + 255) / 256;
  for_each_item(groups * blocks, [&](int64_t item) {
    const int64_t group = item / blocks, block = item % blocks;
    TF_DISPATCH(attention_backward_sum, args, group / args.key_heads, group % args.key_heads,
                sums + group * parts * part_size, parts, rows * block / blocks,
                rows * (block + 1) / blocks);
  });
  return true;
}

// Whether there is a kernel for bfloat16 without conversion to fp32.
bool has_bf16_kernel(const Tensor& query, int64_t queries) {
#if TF_HAVE_UNITS
  constexpr int64_t kMinQueries = 16;
  return query.scalar_type() == ScalarType::BFloat16 &&
         has_dot(product_isa(Element::bfloat16), Dot::bf16) && queries >= kMinQueries;
#else
  return false;
#endif
}

// Calls run(kernels) with the kernels for the call; returns false if bfloat16 must be converted to
// float32.
template <class Run>
bool with_kernels([[maybe_unused]] const AttentionBackwardArgs& args, const Run& run) {
#if TF_HAVE_UNITS
  const bool reduced_float = args.type != Element::float32;
  if (reduced_float || uses_bf16x3(kBf16x3RowsPerQuery * args.queries)) {
    const bool did = run(*TF_DISPATCH_UNITS(bf16_attention_backward_kernels, args.type));
    if (did || reduced_float) return did;
  }
#endif
  return run(*TF_DISPATCH(attention_backward_kernels, ));
}

}  // namespace

void run_attention_backward(AttentionBackwardArgs args) {
  args.delta = shared_scratch(0).floats(args.batch * args.heads * args.queries);
  with_kernels(args, [&](const auto& kernels) { return run(args, kernels, nullptr); });
  trim_shared_scratch();
}

namespace {

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
    Tensor row_max, Tensor row_sum, bool want_query, bool want_key, bool want_value, bool want_mask,
    float dominant, const PackedSequences& packed) {
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
  const int64_t sequences = packed.batch(query), longest = packed.queries(query);
  row_max = as_contiguous(checked("row_max", row_max, {sequences, heads, longest}));
  row_sum = as_contiguous(checked("row_sum", row_sum, {sequences, heads, longest}));
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
                  widened(output), in_float(weights), row_max, row_sum, want_query, want_key,
                  want_value, want_mask, grad_weights ? kDominantInFloat : dominant, packed);
    return std::tuple(narrowed(dquery, query, want_query), narrowed(dkey, key, want_key),
                      narrowed(dvalue, value, want_value),
                      want_mask ? mask_like(dmask) : empty_tensor(query, {0}));
  };
  if (reduced_float && !has_bf16_kernel(query, longest)) return all_in_float();
  AttentionBackwardArgs args{};
  args.type = element_of(query);
  args.dominant = dominant;
  if (grad_weights) {
    STD_TORCH_CHECK(weights.has_value(), kOp, ": grad_weights needs weights");
    for (auto [name, tensor] :
         {std::pair("weights", &weights), std::pair("grad_weights", &grad_weights)})
      *tensor = as_contiguous(checked(name, **tensor, {batch, heads, queries, keys}, type));
    args.weights = weights->const_data_ptr();
    args.grad_weights = grad_weights->const_data_ptr();
  }
  Lengths lengths;
  set_shape(args, query, key, value, mask, key_lengths, is_causal, scale, packed, lengths);
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.output = output.const_data_ptr();
  args.grad = grad.const_data_ptr();
  args.row_max = floats_of(row_max);
  args.row_sum = floats_of(row_sum);
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
  }
  const bool is_empty = args.batch * heads * args.queries == 0 || args.keys == 0;
  if (is_empty || !lengths.cover) {
    for (Tensor* tensor : {&grad_query, &grad_key, &grad_value, &grad_mask})
      torch::stable::zero_(*tensor);
    if (is_empty) return {grad_query, grad_key, grad_value, mask_like(grad_mask)};
  }
  args.delta = shared_scratch(0).floats(args.batch * heads * args.queries);
  float* mask_data = want_mask ? static_cast<float*>(grad_mask.mutable_data_ptr()) : nullptr;
  if (!with_kernels(args, [&](const auto& kernels) { return run(args, kernels, mask_data); }))
    return all_in_float();
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
  const float dominant = is_reduced_float(output) ? kDominantInLowp : kDominantInFloat;
  return gradients(grad, grad_weights, query, key, value, mask, key_lengths, is_causal, scale,
                   dropout_p, seed, output, weights, row_max, row_sum, want_query, want_key,
                   want_value, want_mask, dominant, {query_lengths, longest_queries, longest_keys});
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("attention_backward.cpu", TF_BOX(&tf::attention_backward));
}
