// The CPU operators: schemas, checks that keep a wrong call from crashing, allocation, threads.
// What a call means is checked above, in transformer_fast/functional; the arithmetic is in the
// kernels.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cpu/core/box.h"
#include "cpu/core/host.h"
#include "cpu/gemm/half_ops.h"
#include "cpu/ops/attention/attention_host.h"
#include "cpu/ops/pointwise/dropout_host.h"

namespace tf {
namespace {

// keep: shift and norm, which the backward needs; else they come back empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention(Tensor query, Tensor key, Tensor value,
                                                     std::optional<Tensor> mask,
                                                     std::optional<Tensor> key_lengths,
                                                     bool is_causal, double scale, double dropout_p,
                                                     std::optional<Tensor> seed, bool need_weights,
                                                     bool keep) {
  if (is_half(query))
    return half::attention(query, key, value, mask, key_lengths, is_causal, scale, dropout_p, seed,
                           need_weights, keep);
  const char* op = "attention";
  check_float(op, "query", query);
  check_float(op, "key", key);
  check_float(op, "value", value);
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
                  "attention: query, key and value must be (B, H, length, size)");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2),
                size = query.size(3), keys = key.size(2), value_size = value.size(3);
  STD_TORCH_CHECK(key.size(0) == batch && value.size(0) == batch && key.size(3) == size &&
                      value.size(2) == keys && value.size(1) == key.size(1),
                  "attention: the shapes of query, key and value do not fit");
  const int64_t key_heads = key.size(1);
  STD_TORCH_CHECK(heads == key_heads || (key_heads > 0 && heads % key_heads == 0),
                  "attention: the number of query heads must be a multiple of that of key heads");
#ifdef TF_HAVE_AMX
  if (goes_by_pieces(kPiecesFromQueries * queries)) {
    query = with_unit_stride(query);
    key = with_unit_stride(key);
    value = with_unit_stride(value);
  }
#endif
  AttentionArgs args{};
  set_mask(args, mask, {batch, heads, queries, keys});
  const std::vector<int64_t> lengths = to_int64("key_lengths", key_lengths, batch);
  if (key_lengths) args.key_lengths = lengths.data();
  // Memory order (B, T, H, Dv): joining the heads again costs no copy.
  Tensor output = torch::stable::transpose(fresh(query, {batch, queries, heads, value_size}), 1, 2);
  Tensor shift = keep ? fresh(query, {batch, heads, queries}) : fresh(query, {0});
  Tensor norm = keep ? fresh(query, {batch, heads, queries}) : fresh(query, {0});
  Tensor weights = need_weights ? fresh(query, {batch, heads, queries, keys}) : fresh(query, {0});
  args.query = static_cast<const float*>(query.const_data_ptr());
  args.key = static_cast<const float*>(key.const_data_ptr());
  args.value = static_cast<const float*>(value.const_data_ptr());
  args.output = static_cast<float*>(output.mutable_data_ptr());
  if (keep) {
    args.shift = static_cast<float*>(shift.mutable_data_ptr());
    args.norm = static_cast<float*>(norm.mutable_data_ptr());
  }
  args.weights = need_weights ? static_cast<float*>(weights.mutable_data_ptr()) : nullptr;
  args.batch = batch;
  args.heads = heads;
  args.key_heads = key_heads;
  args.queries = queries;
  args.keys = keys;
  args.size = size;
  args.value_size = value_size;
  for (int d = 0; d < 4; ++d) {
    args.query_stride[d] = query.stride(d);
    args.key_stride[d] = key.stride(d);
    args.value_stride[d] = value.stride(d);
    if (d < 3) args.output_stride[d] = output.stride(d);
  }
  args.scale = static_cast<float>(scale);
  args.causal = is_causal;
  args.dropout = make_dropout(op, dropout_p, seed);
  if (batch * heads * queries > 0) run_attention(args);
  return {output, weights, shift, norm};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_lengths, "
      "bool is_causal, float scale, float dropout_p, Tensor? seed, bool need_weights, "
      "bool keep=True) -> "
      "(Tensor output, Tensor weights, Tensor shift, Tensor norm)");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_attention", TF_BOX(&tf::attention));
}
