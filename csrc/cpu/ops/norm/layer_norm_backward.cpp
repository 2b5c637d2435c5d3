// The operator cpu_layer_norm_backward.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cpu/core/box.h"
#include "cpu/core/host.h"
#include "cpu/gemm/half_ops.h"
#include "cpu/ops/norm/layer_norm_backward_kernel.h"
#include "cpu/ops/pointwise/dropout_host.h"

namespace tf {
namespace {

Rows rows_of(const Tensor& tensor, int64_t columns) {
  if (tensor.dim() > 0 && tensor.size(tensor.dim() - 1) == columns) return as_rows(tensor);
  Tensor flat = as_contiguous(tensor);
  return {flat, static_cast<const float*>(flat.const_data_ptr()), flat.numel() / columns, columns,
          columns};
}

Tensor wanted_like(const Tensor& like, bool wanted) {
  return wanted ? fresh_like(like) : fresh(like, {0});
}

// source, grad, grad_sum and what becomes of them are of one type; statistics, weight and the
// gradients of weight and bias are float32. What is not wanted comes back empty. grad_input: behind
// the dropout, else it is grad_source.
std::tuple<Tensor, Tensor, Tensor, Tensor> gradients(
    Tensor grad, std::optional<Tensor> grad_sum, Tensor source, Tensor mean, Tensor rstd,
    std::optional<Tensor> weight, int64_t normalized, double dropout_p, std::optional<Tensor> seed,
    bool want_source, bool want_input, bool want_weight, bool want_bias, bool annotated) {
  const char* op = "layer_norm_backward";
  const ScalarType type = is_half(source) ? source.scalar_type() : ScalarType::Float;
  check_type(op, "source", source, type, "source");
  check_type(op, "grad", grad, type, "source");
  for (auto [name, tensor] : {std::pair("mean", &mean), std::pair("rstd", &rstd)})
    check_float(op, name, *tensor);
  STD_TORCH_CHECK(grad.sizes().equals(source.sizes()), op, ": grad must have the shape of source");
  if (grad_sum) {
    check_type(op, "grad_sum", *grad_sum, type, "source");
    STD_TORCH_CHECK(grad_sum->sizes().equals(source.sizes()), op,
                    ": grad_sum must have the shape of source");
  }
  const int64_t n = normalized;
  check_normalized(op, source, n, dropout_p);
  const int64_t rows = n == 0 ? 0 : source.numel() / n;
  STD_TORCH_CHECK(mean.numel() == rows && rstd.numel() == rows, op,
                  ": mean and rstd must have one value per row");
  std::optional<Tensor> weight_row;
  if (weight) {
    check_float(op, "weight", *weight);
    STD_TORCH_CHECK(weight->numel() == n, op, ": weight must have ", n, " elements");
    weight_row = as_contiguous(*weight);
  }
  Tensor grad_source = wanted_like(source, want_source);
  Tensor grad_input = wanted_like(source, want_input);
  Tensor grad_weight = fresh_float(source, {want_weight ? n : 0});
  Tensor grad_bias = fresh_float(source, {want_bias ? n : 0});
  if (rows == 0) {
    torch::stable::zero_(grad_weight);
    torch::stable::zero_(grad_bias);
    return {grad_source, grad_input, grad_weight, grad_bias};
  }
  const Rows dy = rows_of(grad, n), s = rows_of(source, n);
  const Rows extra = grad_sum ? rows_of(*grad_sum, n) : Rows{source, nullptr, 0, 0, 0};
  Tensor mean_row = as_contiguous(mean), rstd_row = as_contiguous(rstd);
  const int64_t blocks = std::clamp<int64_t>(rows / 16, 1, 64);
  const bool shares = want_weight || want_bias;
  const LayerNormBackwardArgs args{
      .type = element_of(source),
      .grad = dy.data,
      .grad_sum = extra.data,
      .source = s.data,
      .weight = optional_data(weight_row),
      .mean = static_cast<const float*>(mean_row.const_data_ptr()),
      .rstd = static_cast<const float*>(rstd_row.const_data_ptr()),
      .grad_source = data_if(want_source, grad_source),
      .grad_input = data_if(want_input, grad_input),
      .partial = shares ? shared_scratch(0).floats(blocks * 2 * n) : nullptr,
      .rows = rows,
      .blocks = blocks,
      .n = n,
      .grad_stride = dy.stride,
      .grad_sum_stride = extra.stride,
      .source_stride = s.stride,
      .dropout_columns = source.dim() > 0 ? source.size(source.dim() - 1) : 1,
      .dropout = make_dropout(op, dropout_p, seed),
      .annotated = annotated};
  const int64_t scratch = TF_DISPATCH(layer_norm_backward_scratch, args);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      TF_DISPATCH(layer_norm_backward_block, args, block, kernel_scratch().floats(scratch));
  };
  torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, 16384 * blocks / (rows * n)), run);
  for (int which = 0; which < 2 && shares; ++which) {
    if (!(which == 0 ? want_weight : want_bias)) continue;
    float* total = static_cast<float*>((which == 0 ? grad_weight : grad_bias).mutable_data_ptr());
    torch::stable::parallel_for(0, n, 512, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(layer_norm_backward_sum, args, which, total, begin, end);
    });
  }
  trim_shared_scratch();
  return {grad_source, grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    Tensor grad, std::optional<Tensor> grad_sum, Tensor source, Tensor mean, Tensor rstd,
    std::optional<Tensor> weight, int64_t normalized, double dropout_p, std::optional<Tensor> seed,
    bool want_source, bool want_input, bool want_weight, bool want_bias) {
  return gradients(grad, grad_sum, source, mean, rstd, weight, normalized, dropout_p, seed,
                   want_source, want_input, want_weight, want_bias, false);
}

std::tuple<Tensor, Tensor, Tensor> annotated_layer_norm_backward(Tensor grad, Tensor input,
                                                                 Tensor mean, Tensor rstd,
                                                                 Tensor weight, bool want_input,
                                                                 bool want_weight, bool want_bias) {
  auto [grad_input, none, grad_weight, grad_bias] =
      gradients(grad, std::nullopt, input, mean, rstd, weight, weight.numel(), 0.0, std::nullopt,
                want_input, false, want_weight, want_bias, true);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor source, Tensor mean, "
      "Tensor rstd, Tensor? weight, int normalized, float dropout_p, Tensor? seed, "
      "bool want_source, bool want_input, bool want_weight, bool want_bias) -> "
      "(Tensor grad_source, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "cpu_annotated_layer_norm_backward(Tensor grad, Tensor input, Tensor mean, Tensor rstd, "
      "Tensor weight, bool want_input, bool want_weight, bool want_bias) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_layer_norm_backward", TF_BOX(&tf::layer_norm_backward));
  m.impl("cpu_annotated_layer_norm_backward", TF_BOX(&tf::annotated_layer_norm_backward));
}
