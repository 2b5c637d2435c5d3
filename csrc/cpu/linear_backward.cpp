// The operator cpu_linear_backward.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/half_ops.h"
#include "cpu/linear_backward_host.h"

namespace tf {
namespace {

// Gradients of input, weight and bias; what is not wanted comes back empty.
std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor grad, Tensor input, Tensor weight,
                                                   std::optional<Tensor> preactivation,
                                                   int64_t activation, bool want_input,
                                                   bool want_weight, bool want_bias) {
  if (is_half(input))
    return half::linear_backward(grad, input, weight, preactivation, activation, want_input,
                                 want_weight, want_bias);
  const char* op = "linear_backward";
  check_float(op, "grad", grad);
  check_float(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1 && grad.dim() == input.dim(), op,
                  ": grad and input must have the same number of dimensions, at least one");
  check_weight(op, "weight", weight, input.size(input.dim() - 1), std::nullopt);
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  STD_TORCH_CHECK(row_count(grad) == m && grad.size(grad.dim() - 1) == n, op,
                  ": grad must have the shape of the result");
  Tensor grad_input = want_input ? fresh_rows(input, k) : fresh(input, {0});
  Tensor grad_weight = want_weight ? fresh(weight, {n, k}) : fresh(weight, {0});
  Tensor grad_bias = fresh(weight, {want_bias ? n : 0});
  if (m == 0 || n == 0) {
    for (Tensor* tensor : {&grad_input, &grad_weight, &grad_bias}) torch::stable::zero_(*tensor);
    return {grad_input, grad_weight, grad_bias};
  }
  Rows dy = as_rows(grad);
  if (activation != 0) {
    STD_TORCH_CHECK(preactivation.has_value(), op, ": an activation needs preactivation");
    check_float(op, "preactivation", *preactivation);
    STD_TORCH_CHECK(preactivation->sizes().equals(grad.sizes()), op,
                    ": preactivation must have the shape of grad");
    preactivation = as_contiguous(*preactivation);
    float* to = shared_scratch(1).floats(m * n);
    const SlopeArgs args{dy.data,   static_cast<const float*>(preactivation->const_data_ptr()),
                         to,        n,
                         dy.stride, static_cast<int>(activation)};
    torch::stable::parallel_for(
        0, m, std::max<int64_t>(1, 16384 / n),
        [&](int64_t begin, int64_t end) { TF_DISPATCH(multiply_by_slope, args, begin, end); });
    dy.data = to;
    dy.stride = n;
  }
  if (want_input && k > 0) {
    run_input_gradient(dy.data, dy.stride, weight, m,
                       static_cast<float*>(grad_input.mutable_data_ptr()), 0);
  }
  if (want_weight || want_bias) {
    const Rows x = as_rows(input);
    WeightGradientArgs args{};
    args.grad = dy.data;
    args.x = x.data;
    args.grad_weight = want_weight ? static_cast<float*>(grad_weight.mutable_data_ptr()) : nullptr;
    args.grad_bias = want_bias ? static_cast<float*>(grad_bias.mutable_data_ptr()) : nullptr;
    args.m = m;
    args.n = n;
    args.k = k;
    args.grad_stride = dy.stride;
    args.x_stride = x.stride;
    run_weight_gradient(args, 0);
  }
  trim_shared_scratch();
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_linear_backward(Tensor grad, Tensor input, Tensor weight, Tensor? preactivation, "
      "int activation, bool want_input, bool want_weight, bool want_bias) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_linear_backward", TORCH_BOX(&tf::linear_backward));
}
