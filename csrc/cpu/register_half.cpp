// The CPU operators for bfloat16 and float16: checks that keep a wrong call from crashing,
// allocation, threads. register.cpp calls them; the arithmetic is in the *_half kernels.
#include <cstring>
#include <vector>

#include "cpu/gemm/half_host.h"
#include "cpu/ops/attention/attention_half_kernel.h"
#include "cpu/ops/attention/attention_host.h"
#include "cpu/ops/feed_forward/feed_forward_half_kernel.h"
#include "cpu/ops/pointwise/dropout_host.h"

namespace tf::half {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& key_lengths, bool is_causal, double scale, double dropout_p,
    const std::optional<Tensor>& seed, bool need_weights, bool keep) {
  const char* op = "attention";
  check_like(op, "query", query, query);
  check_like(op, "key", key, query);
  check_like(op, "value", value, query);
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
                  "attention: query, key and value must be (B, H, length, size)");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2),
                size = query.size(3), keys = key.size(2), value_size = value.size(3),
                key_heads = key.size(1);
  STD_TORCH_CHECK(key.size(0) == batch && value.size(0) == batch && key.size(3) == size &&
                      value.size(2) == keys && value.size(1) == key_heads,
                  "attention: the shapes of query, key and value do not fit");
  STD_TORCH_CHECK(heads == key_heads || (key_heads > 0 && heads % key_heads == 0),
                  "attention: the number of query heads must be a multiple of that of key heads");
  TypedAttentionArgs args{};
  set_mask(args, mask, {batch, heads, queries, keys}, query.scalar_type());
  const std::vector<int64_t> lengths = to_int64("key_lengths", key_lengths, batch);
  if (key_lengths) args.key_lengths = lengths.data();
  const Tensor q = with_unit_stride(query), k = with_unit_stride(key), v = with_unit_stride(value);
  // Memory order (B, T, H, Dv): joining the heads again costs no copy.
  Tensor output = torch::stable::transpose(fresh(query, {batch, queries, heads, value_size}), 1, 2);
  Tensor shift = keep ? fresh_float(query, {batch, heads, queries}) : fresh_float(query, {0});
  Tensor norm = keep ? fresh_float(query, {batch, heads, queries}) : fresh_float(query, {0});
  Tensor weights = need_weights ? fresh(query, {batch, heads, queries, keys}) : fresh(query, {0});
  args.type = element_of(query);
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  args.output = output.mutable_data_ptr();
  if (keep) {
    args.shift = static_cast<float*>(shift.mutable_data_ptr());
    args.norm = static_cast<float*>(norm.mutable_data_ptr());
  }
  args.weights = need_weights ? weights.mutable_data_ptr() : nullptr;
  args.batch = batch;
  args.heads = heads;
  args.key_heads = key_heads;
  args.queries = queries;
  args.keys = keys;
  args.size = size;
  args.value_size = value_size;
  for (int d = 0; d < 4; ++d) {
    args.query_stride[d] = q.stride(d);
    args.key_stride[d] = k.stride(d);
    args.value_stride[d] = v.stride(d);
    if (d < 3) args.output_stride[d] = output.stride(d);
  }
  args.scale = static_cast<float>(scale);
  args.causal = is_causal;
  args.dropout = make_dropout(op, dropout_p, seed);
  if (batch * heads * queries > 0) run_attention(args);
  return {output, weights, shift, norm};
}

Tensor pack_weight(const Tensor& weight) {
  check_like("pack_weight", "weight", weight, weight);
  STD_TORCH_CHECK(weight.dim() == 2, "pack_weight: weight must be a matrix");
  Tensor packed = fresh_weight(weight, packed_bytes(weight) / 2 + kPackedTail);
  auto* place = static_cast<uint16_t*>(packed.mutable_data_ptr());
  if (weight.numel() > 0) pack(weight, place);
  uint16_t* end = place + packed.numel();
  std::memset(end - kPackedTail, 0, kPackedTail * sizeof(uint16_t));
  end[-1] = packed_layout(weight);
  return packed;
}

void run_attention(TypedAttentionArgs args) {
  args.next_head = next_head(args);
  if (run_few_attention(args)) return;
  const int64_t scratch = TF_DISPATCH(half_attention_scratch, args);
  each_attention_item(args, [&](int64_t b, int64_t key_head, int64_t begin, int64_t end) {
    TF_DISPATCH(half_attention_queries, args, b, key_head, begin, end,
                bytes_of(kernel_scratch(), scratch));
  });
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& packed,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
              int64_t activation, Tensor* preactivation) {
  const char* op = "linear";
  check_like(op, "input", input, input);
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  check_weight(op, "weight", weight, input.size(input.dim() - 1), bias, input.scalar_type());
  Tensor output = fresh_rows(input, weight.size(0));
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  if (residual) {
    check_like(op, "residual", *residual, input);
    STD_TORCH_CHECK(residual->sizes().equals(output.sizes()),
                    "linear: residual must have the shape of the result");
  }
  if (m * n == 0) return output;
  const HalfRows x = half_rows(input);
  const HalfRows r = residual ? half_rows(*residual) : HalfRows{input, nullptr, 0};
  const std::optional<Tensor> b = as_contiguous(bias);
  run_linear(
      {element_of(input), x.data, nullptr, data_of(b), r.data, output.mutable_data_ptr(), m, k, n,
       x.stride, r.stride, n, checked_activation("linear", activation), data_of(preactivation)},
      weight, packed, 0);
  trim_shared_scratch();
  return output;
}

Tensor feed_forward(const Tensor& input, const Tensor& weight1,
                    const std::optional<Tensor>& packed1, const std::optional<Tensor>& bias1,
                    const Tensor& weight2, const std::optional<Tensor>& packed2,
                    const std::optional<Tensor>& bias2, int64_t activation, double dropout_p,
                    const std::optional<Tensor>& seed, Tensor* preactivation) {
  const char* op = "feed_forward";
  check_like(op, "input", input, input);
  STD_TORCH_CHECK(input.dim() >= 1, "feed_forward: input must have a dimension");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), bias1, input.scalar_type());
  check_weight(op, "weight2", weight2, weight1.size(0), bias2, input.scalar_type());
  Tensor output = fresh_rows(input, weight2.size(0));
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  if (m * n == 0) {
    if (preactivation != nullptr) torch::stable::zero_(*preactivation);
    return output;
  }
  const HalfRows x = half_rows(input);
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  run_feed_forward(
      {element_of(input), x.data, nullptr, data_of(b1), nullptr, data_of(b2),
       output.mutable_data_ptr(), m, k, f, n, x.stride, checked_activation(op, activation),
       make_dropout(op, dropout_p, seed), 0, data_of(preactivation)},
      weight1, packed1, weight2, packed2);
  trim_shared_scratch();
  return output;
}

void run_feed_forward(HalfFeedForwardArgs args, const Tensor& weight1,
                      const std::optional<Tensor>& packed1, const Tensor& weight2,
                      const std::optional<Tensor>& packed2) {
  const int64_t m = args.m, k = args.k, f = args.f, n = args.n;
  if (m < 64 * torch::stable::get_num_threads() && !args.dropout.on) {
    // Too few rows to share out: threads take columns, the small hidden block stays in cache.
    void* hidden = shared_scratch(kHiddenSlot).floats((m + 1) / 2, f);
    run_linear({args.type, args.x, nullptr, args.bias1, nullptr, hidden, m, k, f, args.x_stride, 0,
                f, args.activation, args.preactivation},
               weight1, packed1, 0);
    run_linear({args.type, hidden, nullptr, args.bias2, args.residual, args.y, m, f, n, f,
                args.residual_stride, n, 0},
               weight2, packed2, 1);
    return;
  }
  args.packed1 = panels_of(weight1, packed1, 0);
  args.packed2 = panels_of(weight2, packed2, 1);
  const int64_t tall = TF_DISPATCH(half_feed_forward_row_block, args);
  for_each_row_block(m, tall, [&](int64_t begin, int64_t end) {
    const int64_t scratch = TF_DISPATCH(half_feed_forward_scratch, args, end - begin);
    TF_DISPATCH(half_feed_forward_rows, args, begin, end, bytes_of(kernel_scratch(), scratch));
  });
}

}  // namespace tf::half
