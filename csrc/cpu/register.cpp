// The CPU operators: schemas, checks that keep a wrong call from crashing, allocation, threads. What
// a call means is checked above, in transformer_fast/functional; the arithmetic is in the kernels.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cpu/attention_kernel.h"
#include "cpu/dropout_host.h"
#include "cpu/feed_forward_kernel.h"
#include "cpu/host.h"
#include "cpu/layer_norm_kernel.h"
#include "cpu/linear_host.h"

namespace tf {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm(Tensor input, std::optional<Tensor> residual,
                                                      std::optional<Tensor> weight,
                                                      std::optional<Tensor> bias,
                                                      int64_t normalized, double eps,
                                                      double dropout_p,
                                                      std::optional<Tensor> seed) {
  check_float("layer_norm", "input", input);
  STD_TORCH_CHECK(normalized >= 0 && (normalized == 0 || input.numel() % normalized == 0),
                  "layer_norm: ", input.numel(), " elements are no rows of ", normalized);
  if (residual) {
    check_float("layer_norm", "residual", *residual);
    STD_TORCH_CHECK(residual->sizes().equals(input.sizes()),
                    "layer_norm: residual must have the shape of input");
  }
  std::optional<Tensor> weight_row, bias_row;
  for (auto [name, from, to] :
       {std::tuple("weight", &weight, &weight_row), std::tuple("bias", &bias, &bias_row)}) {
    if (!*from) continue;
    check_float("layer_norm", name, **from);
    STD_TORCH_CHECK((*from)->numel() == normalized, "layer_norm: ", name, " must have ", normalized,
                    " elements");
    *to = torch::stable::contiguous(**from);
  }
  const int64_t rows = normalized == 0 ? 0 : input.numel() / normalized;
  Tensor output = torch::stable::new_empty(input, input.sizes());
  prefer_huge_pages(output);
  Tensor sum = residual ? torch::stable::new_empty(input, input.sizes()) : fresh(input, {0});
  if (residual) prefer_huge_pages(sum);
  Tensor mean = fresh(input, {rows}), rstd = fresh(input, {rows});
  if (rows > 0) {
    const auto view = [&](const Tensor& t) {
      if (t.dim() > 0 && t.size(t.dim() - 1) == normalized) return as_rows(t);
      Tensor flat = torch::stable::contiguous(t);
      return Rows{flat, static_cast<const float*>(flat.const_data_ptr()), rows, normalized,
                  normalized};
    };
    const Rows x = view(input);
    const Rows r = residual ? view(*residual) : Rows{input, nullptr, 0, 0, 0};
    const LayerNormArgs args{x.data,
                             r.data,
                             optional_data(weight_row),
                             optional_data(bias_row),
                             static_cast<float*>(output.mutable_data_ptr()),
                             residual ? static_cast<float*>(sum.mutable_data_ptr()) : nullptr,
                             static_cast<float*>(mean.mutable_data_ptr()),
                             static_cast<float*>(rstd.mutable_data_ptr()),
                             normalized,
                             x.stride,
                             r.stride,
                             static_cast<float>(eps),
                             input.dim() > 0 ? input.size(input.dim() - 1) : 1,
                             make_dropout("layer_norm", dropout_p, seed)};
    const int64_t grain = std::max<int64_t>(1, 16384 / normalized);
    const int64_t scratch = TF_DISPATCH(layer_norm_scratch, args);
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(layer_norm_rows, args, begin, end, kernel_scratch().floats(scratch));
    });
  }
  return {output, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> attention(Tensor query, Tensor key, Tensor value,
                                             std::optional<Tensor> mask,
                                             std::optional<Tensor> key_lengths, bool is_causal,
                                             double scale, bool need_weights) {
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
  AttentionArgs args{};
  if (mask) {
    STD_TORCH_CHECK(mask->is_cpu() && (mask->scalar_type() == ScalarType::Bool ||
                                       mask->scalar_type() == ScalarType::Float),
                    "attention: mask must be a bool or float32 tensor on the CPU");
    STD_TORCH_CHECK(mask->dim() == 4, "attention: mask must have 4 dimensions");
    const int64_t full[4] = {batch, heads, queries, keys};
    for (int d = 0; d < 4; ++d) {
      STD_TORCH_CHECK(mask->size(d) == full[d] || mask->size(d) == 1,
                      "attention: mask does not broadcast to the scores");
      args.mask_stride[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
    }
    args.mask = mask->const_data_ptr();
    args.mask_is_bool = mask->scalar_type() == ScalarType::Bool;
  }
  std::vector<int64_t> lengths;
  if (key_lengths) {
    STD_TORCH_CHECK(key_lengths->is_cpu() && key_lengths->numel() == batch,
                    "attention: key_lengths must hold one length per batch element");
    Tensor flat = torch::stable::contiguous(
        torch::stable::to(*key_lengths, std::optional(ScalarType::Long)));
    const auto* data = static_cast<const int64_t*>(flat.const_data_ptr());
    lengths.assign(data, data + batch);
    args.key_lengths = lengths.data();
  }
  // Memory order (B, T, H, Dv): joining the heads again costs no copy.
  Tensor output = torch::stable::transpose(fresh(query, {batch, queries, heads, value_size}), 1, 2);
  Tensor lse = fresh(query, {batch, heads, queries});
  Tensor weights = need_weights ? fresh(query, {batch, heads, queries, keys}) : fresh(query, {0});
  args.query = static_cast<const float*>(query.const_data_ptr());
  args.key = static_cast<const float*>(key.const_data_ptr());
  args.value = static_cast<const float*>(value.const_data_ptr());
  args.output = static_cast<float*>(output.mutable_data_ptr());
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
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
  if (batch * heads * queries == 0) return {output, lse, weights};

  // An item is some queries of the heads that share a key head. Each packs its keys again, so an
  // item is all of them unless that leaves threads idle.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t groups = batch * key_heads, rows = heads / key_heads * queries;
  const int64_t wanted = groups >= 4 * threads || threads == 1 ? 1 : 4 * threads / groups + 1;
  const int64_t chunks = std::max<int64_t>(1, std::min(wanted, rows / 256));
  const int64_t scratch = TF_DISPATCH(attention_scratch, args);
  for_each_item(groups * chunks, [&](int64_t item) {
    // The last chunks of a causal group are the longest; they go first.
    const int64_t group = item / chunks, chunk = chunks - 1 - item % chunks;
    const int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
    TF_DISPATCH(attention_queries, args, group / key_heads, group % key_heads, begin, end,
                kernel_scratch().floats(scratch));
    kernel_scratch().trim();
  });
  return {output, lse, weights};
}

// Floats behind the panels of a packed weight: room for prefetching, and at the very end the width of
// a panel, which tells whether the instruction set in use can read it.
constexpr int64_t kPackedTail = 64;

void pack(const Tensor& weight, float* place) {
  const Rows w = as_rows(weight);
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t panels = (weight.size(0) + width - 1) / width;
  torch::stable::parallel_for(
      0, panels, std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, w.columns))),
      [&](int64_t begin, int64_t end) {
        TF_DISPATCH(pack_panels, w.data, w.stride, weight.size(0), w.columns, place, begin, end);
      });
}

Tensor pack_weight(Tensor weight) {
  check_float("pack_weight", "weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2, "pack_weight: weight must be a matrix");
  const int64_t size = TF_DISPATCH(packed_size, weight.size(0), weight.size(1)) + kPackedTail;
  Tensor packed = fresh(weight, {size});
  float* place = static_cast<float*>(packed.mutable_data_ptr());
  if (weight.numel() > 0) pack(weight, place);
  for (int64_t i = size - kPackedTail; i < size; ++i) place[i] = 0.0f;
  place[size - 1] = static_cast<float>(TF_DISPATCH(panel_columns, ));
  return packed;
}

// The panels of a weight: those given, if they are a packed copy of it that this instruction set
// reads, else packed now into the calling thread's shared scratch.
const float* panels_of(const Tensor& weight, const std::optional<Tensor>& packed, int slot,
                       int64_t room) {
  const int64_t n = weight.size(0), k = weight.size(1);
  if (packed && packed->is_cpu() && packed->scalar_type() == ScalarType::Float &&
      packed->is_contiguous() &&
      packed->numel() == TF_DISPATCH(packed_size, n, k) + kPackedTail) {
    const float* data = static_cast<const float*>(packed->const_data_ptr());
    const bool width = data[packed->numel() - 1] == static_cast<float>(TF_DISPATCH(panel_columns, ));
    const bool adjacent = k <= 1 || weight.stride(1) == 1;
    if (width && adjacent &&
        TF_DISPATCH(packed_matches, static_cast<const float*>(weight.const_data_ptr()),
                    weight.stride(0), n, k, data))
      return data;
  }
  float* place = shared_scratch(slot).floats(room);
  pack(weight, place);
  return place;
}

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> packed,
              std::optional<Tensor> bias, std::optional<Tensor> residual, int64_t activation) {
  check_float("linear", "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  check_weight("linear", "weight", weight, input.size(input.dim() - 1), bias);
  Tensor output = result_rows(input, weight.size(0));
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  if (residual) {
    check_float("linear", "residual", *residual);
    STD_TORCH_CHECK(residual->sizes().equals(output.sizes()),
                    "linear: residual must have the shape of the result");
  }
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const Rows r = residual ? as_rows(*residual) : Rows{input, nullptr, 0, 0, 0};
  const std::optional<Tensor> b = contiguous(bias);
  const float* panels =
      panels_of(weight, packed, 0, TF_DISPATCH(packed_size, n, k) + kPackedTail);
  run_linear({x.data, panels, optional_data(b), r.data,
              static_cast<float*>(output.mutable_data_ptr()), m, k, n, x.stride, r.stride, n,
              static_cast<int>(activation)});
  shared_scratch(0).trim();
  return output;
}

Tensor feed_forward(Tensor input, Tensor weight1, std::optional<Tensor> packed1,
                    std::optional<Tensor> bias1, Tensor weight2, std::optional<Tensor> packed2,
                    std::optional<Tensor> bias2, int64_t activation) {
  const char* op = "feed_forward";
  check_float(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, "feed_forward: input must have a dimension");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), bias1);
  check_weight(op, "weight2", weight2, weight1.size(0), bias2);
  Tensor output = result_rows(input, weight2.size(0));
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0),
                n = weight2.size(0);
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const std::optional<Tensor> b1 = contiguous(bias1), b2 = contiguous(bias2);
  const int64_t size1 = TF_DISPATCH(packed_size, f, k) + kPackedTail,
                size2 = TF_DISPATCH(packed_size, n, f) + kPackedTail;
  const float* panels1 = panels_of(weight1, packed1, 0, size1);
  const float* panels2 = panels_of(weight2, packed2, 1, size2);
  float* y = static_cast<float*>(output.mutable_data_ptr());
  const int64_t threads = torch::stable::get_num_threads();
  if (m < 56 * threads) {
    // Too few rows to share out: threads take columns, the small hidden block stays in cache.
    float* hidden = shared_scratch(2).floats(m * f);
    run_linear({x.data, panels1, optional_data(b1), nullptr, hidden, m, k, f, x.stride, 0, f,
                static_cast<int>(activation)});
    run_linear({hidden, panels2, optional_data(b2), nullptr, y, m, f, n, f, 0, n,
                0});
  } else {
    const FeedForwardArgs args{x.data, panels1, optional_data(b1), panels2,
                               optional_data(b2), y, m, k, f, n, x.stride,
                               static_cast<int>(activation)};
    const int64_t most = TF_DISPATCH(feed_forward_row_block, args);
    int64_t blocks = (m + most - 1) / most;
    blocks = (blocks + threads - 1) / threads * threads;
    const int64_t scratch = TF_DISPATCH(feed_forward_scratch, args, (m + blocks - 1) / blocks);
    for_each_item(blocks, [&](int64_t item) {
      TF_DISPATCH(feed_forward_rows, args, m * item / blocks, m * (item + 1) / blocks,
                  kernel_scratch().floats(scratch));
    });
  }
  for (int slot = 0; slot < 3; ++slot) shared_scratch(slot).trim();
  return output;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_layer_norm(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "int normalized, float eps, float dropout_p, Tensor? seed) -> "
      "(Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "cpu_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_lengths, "
      "bool is_causal, float scale, bool need_weights) -> (Tensor output, Tensor lse, Tensor "
      "weights)");
  m.def("cpu_pack_weight(Tensor weight) -> Tensor");
  m.def(
      "cpu_linear(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor? residual, int activation) -> "
      "Tensor");
  m.def(
      "cpu_feed_forward(Tensor input, Tensor weight1, Tensor? packed1, Tensor? bias1, "
      "Tensor weight2, Tensor? packed2, Tensor? bias2, int activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_layer_norm", TORCH_BOX(&tf::layer_norm));
  m.impl("cpu_attention", TORCH_BOX(&tf::attention));
  m.impl("cpu_pack_weight", TORCH_BOX(&tf::pack_weight));
  m.impl("cpu_linear", TORCH_BOX(&tf::linear));
  m.impl("cpu_feed_forward", TORCH_BOX(&tf::feed_forward));
}
