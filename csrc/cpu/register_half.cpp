// The CPU operators for bfloat16 and float16: checks that keep a wrong call from crashing,
// allocation, threads. register.cpp calls them; the arithmetic is in the *_half kernels.
#include <vector>

#include "cpu/gemm/half_host.h"
#include "cpu/ops/attention/attention_half_kernel.h"
#include "cpu/ops/attention/attention_host.h"
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

void run_attention(TypedAttentionArgs args) {
  args.next_head = next_head(args);
  if (run_few_attention(args)) return;
  const int64_t scratch = TF_DISPATCH(half_attention_scratch, args);
  each_attention_item(args, [&](int64_t b, int64_t key_head, int64_t begin, int64_t end) {
    TF_DISPATCH(half_attention_queries, args, b, key_head, begin, end,
                bytes_of(kernel_scratch(), scratch));
  });
}

}  // namespace tf::half
