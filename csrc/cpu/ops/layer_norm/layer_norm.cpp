// Operators layer_norm, add_layer_norm, layer_norm_training and layer_norm_backward, for all kinds
// of norms.
#include "cpu/ops/layer_norm/layer_norm.h"

#include <algorithm>
#include <tuple>

#include "cpu/core/host.h"
#include "kernel_table.h"

namespace tf {

void run_layer_norm(const LayerNormArgs& args, Index rows) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, args.n));
  parallel_for(0, rows, grain,
               [&](int64_t begin, int64_t end) { run_layer_norm_rows(args, begin, end); });
}

void run_layer_norm_rows(const LayerNormArgs& args, Index begin, Index end) {
  const bool in_float = args.type == Element::float32;
  const int64_t scratch =
      in_float ? TF_DISPATCH(layer_norm_scratch, args) : TF_DISPATCH(lowp_layer_norm_scratch, args);
  void* place = bytes_of(kernel_scratch(), scratch);
  if (in_float)
    TF_DISPATCH(layer_norm_rows, args, begin, end, place);
  else
    TF_DISPATCH(lowp_layer_norm_rows, args, begin, end, place);
}

void run_layer_norm_backward(LayerNormBackwardArgs args, void* grad_weight, void* grad_bias) {
  const int64_t rows = args.rows, n = args.n;
  args.blocks = std::clamp<int64_t>(rows / 16, 1, 64);
  if (grad_weight != nullptr || grad_bias != nullptr)
    args.partial = shared_scratch(0).floats(args.blocks * 2 * n);
  const int64_t scratch = TF_DISPATCH(layer_norm_backward_scratch, args);
  const int64_t grain = std::max<int64_t>(1, 16384 * args.blocks / (rows * n));
  parallel_for(0, args.blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      TF_DISPATCH(layer_norm_backward_block, args, block, kernel_scratch().floats(scratch));
  });
  for (int which = 0; which < 2; ++which) {
    void* total = which == 0 ? grad_weight : grad_bias;
    if (total == nullptr) continue;
    parallel_for(0, n, 512, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(layer_norm_backward_sum, args, which, total, begin, end);
    });
  }
  trim_shared_scratch();
}

namespace {

NormKind checked_kind(const char* op, int64_t kind) {
  STD_TORCH_CHECK(kind >= 0 && kind < kNormKinds, op, ": there is no kind of norm ", kind);
  return static_cast<NormKind>(kind);
}

// `sum` with a residual only, statistics only if saved for the backward.
struct Normalized {
  Tensor output;
  std::optional<Tensor> sum, mean, rstd;
};

Normalized normalize(const Tensor& input, const std::optional<Tensor>& residual,
                     const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                     int64_t dims, double eps, double dropout_p, const std::optional<Tensor>& seed,
                     bool keep, int64_t kind) {
  const char* op = "layer_norm";
  const ScalarType type = checked_float_type(op, "input", input);
  const int64_t n = normalized_size(op, input, dims);
  if (residual) {
    check_type(op, "residual", *residual, type, "input");
    STD_TORCH_CHECK(residual->sizes().equals(input.sizes()), op,
                    ": residual must have the shape of input");
  }
  ScalarType weight_type = type;
  for (auto [name, tensor] : {std::pair("weight", &weight), std::pair("bias", &bias)}) {
    if (!*tensor) continue;
    if ((*tensor)->scalar_type() == ScalarType::Float) weight_type = ScalarType::Float;
    check_type(op, name, **tensor, weight_type, "input");
    STD_TORCH_CHECK((*tensor)->numel() == n, op, ": ", name, " must have ", n, " elements");
  }
  STD_TORCH_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op,
                  ": weight and bias must have the same dtype");
  const std::optional<Tensor> weight_row = as_contiguous(weight), bias_row = as_contiguous(bias);
  Normalized result{empty_tensor_like(input), {}, {}, {}};
  if (residual) result.sum = empty_tensor_like(input);
  if (keep) {
    result.mean = empty_statistics(input, dims);
    result.rstd = empty_statistics(input, dims);
  }
  if (input.numel() == 0) return result;
  const Rows x = as_rows(input, n);
  const Rows r = residual ? as_rows(*residual, n) : Rows{input, nullptr, 0};
  run_layer_norm(
      {.type = element_of(input),
       .weight_type = weight_type == ScalarType::Float ? Element::float32 : element_of(input),
       .x = x.data,
       .residual = r.data,
       .weight = weight_row ? weight_row->const_data_ptr() : nullptr,
       .bias = bias_row ? bias_row->const_data_ptr() : nullptr,
       .y = result.output.mutable_data_ptr(),
       .sum = residual ? result.sum->mutable_data_ptr() : nullptr,
       .mean = mutable_floats(result.mean),
       .rstd = mutable_floats(result.rstd),
       .n = n,
       .x_stride = x.stride,
       .residual_stride = r.stride,
       .eps = static_cast<float>(eps),
       .dropout_columns = input.size(input.dim() - 1),
       .dropout = make_dropout(op, dropout_p, seed),
       .kind = checked_kind(op, kind)},
      input.numel() / n);
  return result;
}

// For inference: without saved tensors, whose allocation would take as long as a small input.
Tensor layer_norm(Tensor input, std::optional<Tensor> weight, std::optional<Tensor> bias,
                  int64_t dims, double eps, int64_t kind) {
  return normalize(input, {}, weight, bias, dims, eps, 0.0, {}, false, kind).output;
}

std::tuple<Tensor, Tensor> add_layer_norm(Tensor input, Tensor residual,
                                          std::optional<Tensor> weight, std::optional<Tensor> bias,
                                          int64_t dims, double eps, int64_t kind) {
  const Normalized result =
      normalize(input, residual, weight, bias, dims, eps, 0.0, {}, false, kind);
  return {result.output, *result.sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_training(
    Tensor input, std::optional<Tensor> residual, std::optional<Tensor> weight,
    std::optional<Tensor> bias, int64_t dims, double eps, int64_t kind, double dropout_p,
    std::optional<Tensor> seed) {
  const Normalized result =
      normalize(input, residual, weight, bias, dims, eps, dropout_p, seed, true, kind);
  return {result.output, result.sum ? *result.sum : empty_tensor(input, {0}), *result.mean,
          *result.rstd};
}

Tensor wanted_like(const Tensor& like, bool wanted) {
  return wanted ? empty_tensor_like(like) : empty_tensor(like, {0});
}

// source, grad, grad_sum and their gradients have one type; weight has the same or float32, and so
// have grad_weight and grad_bias. Results that are not wanted are empty. grad_input: of the
// dropout's input; without dropout it equals grad_source.
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    Tensor grad, std::optional<Tensor> grad_sum, Tensor source, std::optional<Tensor> weight,
    Tensor mean, Tensor rstd, int64_t dims, int64_t kind, double dropout_p,
    std::optional<Tensor> seed, bool want_source, bool want_input, bool want_weight,
    bool want_bias) {
  const char* op = "layer_norm_backward";
  const ScalarType type = checked_float_type(op, "source", source);
  check_type(op, "grad", grad, type, "source");
  for (auto [name, tensor] : {std::pair("mean", &mean), std::pair("rstd", &rstd)})
    check_float(op, name, *tensor);
  STD_TORCH_CHECK(grad.sizes().equals(source.sizes()), op, ": grad must have the shape of source");
  if (grad_sum) {
    check_type(op, "grad_sum", *grad_sum, type, "source");
    STD_TORCH_CHECK(grad_sum->sizes().equals(source.sizes()), op,
                    ": grad_sum must have the shape of source");
  }
  const int64_t n = normalized_size(op, source, dims);
  const int64_t rows = n == 0 ? mean.numel() : source.numel() / n;
  STD_TORCH_CHECK(mean.numel() == rows && rstd.numel() == rows, op,
                  ": mean and rstd must have one value per row");
  std::optional<Tensor> weight_row;
  if (weight) {
    check_type(op, "weight", *weight, is_reduced_float(*weight) ? type : ScalarType::Float,
               "source");
    STD_TORCH_CHECK(weight->numel() == n, op, ": weight must have ", n, " elements");
    weight_row = as_contiguous(*weight);
  }
  Tensor grad_source = wanted_like(source, want_source);
  Tensor grad_input = wanted_like(source, want_input);
  const auto shape = source.sizes().slice(static_cast<size_t>(source.dim() - dims));
  const Tensor& like = weight ? *weight : source;
  Tensor grad_weight = want_weight ? empty_tensor(like, shape) : empty_tensor(source, {0});
  Tensor grad_bias = want_bias ? empty_tensor(like, shape) : empty_tensor(source, {0});
  if (source.numel() == 0) {
    torch::stable::zero_(grad_weight);
    torch::stable::zero_(grad_bias);
    return {grad_source, grad_input, grad_weight, grad_bias};
  }
  const Rows dy = as_rows(grad, n), s = as_rows(source, n);
  const Rows extra = grad_sum ? as_rows(*grad_sum, n) : Rows{source, nullptr, 0};
  Tensor mean_row = as_contiguous(mean), rstd_row = as_contiguous(rstd);
  run_layer_norm_backward({.type = element_of(source),
                           .weight_type = element_of(like),
                           .grad = dy.data,
                           .grad_sum = extra.data,
                           .source = s.data,
                           .weight = data_of(weight_row),
                           .mean = static_cast<const float*>(mean_row.const_data_ptr()),
                           .rstd = static_cast<const float*>(rstd_row.const_data_ptr()),
                           .grad_source = data_if(want_source, grad_source),
                           .grad_input = data_if(want_input, grad_input),
                           .partial = nullptr,
                           .rows = rows,
                           .blocks = 0,
                           .n = n,
                           .grad_stride = dy.stride,
                           .grad_sum_stride = extra.stride,
                           .source_stride = s.stride,
                           .dropout_columns = source.size(source.dim() - 1),
                           .dropout = make_dropout(op, dropout_p, seed),
                           .kind = checked_kind(op, kind)},
                          data_if(want_weight, grad_weight), data_if(want_bias, grad_bias));
  return {grad_source, grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("layer_norm.cpu", TF_BOX(&tf::layer_norm));
  m.impl("add_layer_norm.cpu", TF_BOX(&tf::add_layer_norm));
  m.impl("layer_norm_training.cpu", TF_BOX(&tf::layer_norm_training));
  m.impl("layer_norm_backward.cpu", TF_BOX(&tf::layer_norm_backward));
}
