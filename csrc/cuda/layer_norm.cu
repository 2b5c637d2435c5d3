// The operators layer_norm_training and layer_norm_backward.
#include <tuple>
#include <vector>

#include "cuda/layer_norm.cuh"
#include "cuda/operators.h"

namespace tf::cuda {
namespace {

constexpr const char* kOp = "layer_norm";

std::optional<Tensor> parameter(const char* name, const std::optional<Tensor>& tensor,
                                const Tensor& input, int64_t columns) {
  if (!tensor) return std::nullopt;
  check_like(kOp, name, *tensor, input);
  STD_TORCH_CHECK(tensor->numel() == columns, kOp, ": ", name, " must have ", columns, " elements");
  return as_contiguous(*tensor);
}

int64_t count_rows(const Tensor& input, int64_t columns) {
  const int64_t rows = columns == 0 ? 0 : input.numel() / columns;
  check_rows(kOp, rows);
  return rows;
}

void check_same_shape(const char* name, const Tensor& tensor, const Tensor& input) {
  check_like(kOp, name, tensor, input);
  STD_TORCH_CHECK(tensor.sizes().equals(input.sizes()), kOp, ": ", name,
                  " must have the shape of input");
}

void check_kind(int64_t kind) {
  STD_TORCH_CHECK(kind == 0, kOp, ": CUDA supports LayerNorm (kind 0) only, not kind ", kind);
}

// Returns (output; sum, empty without residual; mean; rstd).
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_training(
    Tensor input, std::optional<Tensor> residual, std::optional<Tensor> weight,
    std::optional<Tensor> bias, int64_t dims, double eps, int64_t kind, double dropout_p,
    std::optional<Tensor> seed) {
  check_kind(kind);
  const Element type = element_of(kOp, input);
  const int64_t normalized = normalized_size(kOp, input, dims);
  const int64_t rows = count_rows(input, normalized);
  if (residual) check_same_shape("residual", *residual, input);
  weight = parameter("weight", weight, input, normalized);
  bias = parameter("bias", bias, input, normalized);
  Tensor output = empty_contiguous(input);
  Tensor sum = residual ? empty_contiguous(input) : empty(input, {0});
  const int64_t* sizes = input.sizes().data();
  const std::vector<int64_t> lead(sizes, sizes + input.dim() - dims);
  Tensor mean = empty(input, lead, ScalarType::Float), rstd = empty(input, lead, ScalarType::Float);
  if (rows == 0) return {output, sum, mean, rstd};
  const OnDevice device(input);
  const Rows x = as_rows(input, normalized);
  const Rows other = residual ? as_rows(*residual, normalized) : Rows{input, nullptr, 0};
  launch_layer_norm({.type = type,
                     .input = x.data,
                     .residual = other.data,
                     .weight = data_of(weight),
                     .bias = data_of(bias),
                     .output = output.mutable_data_ptr(),
                     .sum = residual ? sum.mutable_data_ptr() : nullptr,
                     .mean = static_cast<float*>(mean.mutable_data_ptr()),
                     .rstd = static_cast<float*>(rstd.mutable_data_ptr()),
                     .rows = rows,
                     .columns = normalized,
                     .input_stride = x.stride,
                     .residual_stride = other.stride,
                     .eps = static_cast<float>(eps),
                     .dropout = make_dropout(kOp, dropout_p, seed, input),
                     .dropout_columns = input.size(input.dim() - 1)},
                    device.stream);
  return {output, sum, mean, rstd};
}

// Returns the gradients of source (the norm's input), input (before dropout), weight and bias;
// empty if not requested.
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    Tensor grad, std::optional<Tensor> grad_sum, Tensor source, std::optional<Tensor> weight,
    Tensor mean, Tensor rstd, int64_t dims, int64_t kind, double dropout_p,
    std::optional<Tensor> seed, bool want_source, bool want_input, bool want_weight,
    bool want_bias) {
  check_kind(kind);
  const Element type = element_of(kOp, source);
  const int64_t normalized = normalized_size(kOp, source, dims);
  const int64_t rows = count_rows(source, normalized);
  check_same_shape("grad", grad, source);
  if (grad_sum) check_same_shape("grad_sum", *grad_sum, source);
  for (const Tensor* statistic : {&mean, &rstd})
    STD_TORCH_CHECK(statistic->numel() == rows && statistic->is_contiguous() &&
                        statistic->scalar_type() == ScalarType::Float &&
                        statistic->get_device() == source.get_device(),
                    kOp, ": mean and rstd must be results of the forward");
  weight = parameter("weight", weight, source, normalized);
  Tensor grad_source = want_source ? empty_contiguous(source) : empty(source, {0});
  Tensor grad_input = want_input ? empty_contiguous(source) : empty(source, {0});
  const int64_t* sizes = source.sizes().data();
  const std::vector<int64_t> shape(sizes + source.dim() - dims, sizes + source.dim()), none{0};
  Tensor grad_weight = empty(source, want_weight ? shape : none);
  Tensor grad_bias = empty(source, want_bias ? shape : none);
  if (normalized == 0) return {grad_source, grad_input, grad_weight, grad_bias};
  const OnDevice device(source);
  const int64_t shares = layer_norm_backward_shares(rows);
  std::optional<Tensor> partial;
  if (want_weight || want_bias)
    partial = empty(source, {2, shares > 0 ? shares : 1, normalized}, ScalarType::Float);
  const Rows dy = as_rows(grad, normalized), x = as_rows(source, normalized);
  const Rows other = grad_sum ? as_rows(*grad_sum, normalized) : Rows{source, nullptr, 0};
  const auto if_wanted = [](bool wanted, Tensor& tensor) {
    return wanted ? tensor.mutable_data_ptr() : nullptr;
  };
  launch_layer_norm_backward(
      {.type = type,
       .grad = dy.data,
       .grad_sum = other.data,
       .input = x.data,
       .weight = data_of(weight),
       .mean = static_cast<const float*>(mean.const_data_ptr()),
       .rstd = static_cast<const float*>(rstd.const_data_ptr()),
       .grad_source = if_wanted(want_source, grad_source),
       .grad_input = if_wanted(want_input, grad_input),
       .grad_weight = if_wanted(want_weight, grad_weight),
       .grad_bias = if_wanted(want_bias, grad_bias),
       .partial = partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr,
       .rows = rows,
       .columns = normalized,
       .grad_stride = dy.stride,
       .grad_sum_stride = other.stride,
       .input_stride = x.stride,
       .shares = shares,
       .dropout = make_dropout(kOp, dropout_p, seed, source),
       .dropout_columns = source.size(source.dim() - 1)},
      device.stream);
  return {grad_source, grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace tf::cuda

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, TF_DISPATCH_KEY, m) {
  m.impl("layer_norm_training.cuda", TORCH_BOX(&tf::cuda::layer_norm_training));
  m.impl("layer_norm_backward.cuda", TORCH_BOX(&tf::cuda::layer_norm_backward));
}
