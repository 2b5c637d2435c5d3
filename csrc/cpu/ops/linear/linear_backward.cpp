// The operator cpu_linear_backward.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/core/box.h"
#include "cpu/gemm/half_ops.h"
#include "cpu/ops/linear/backward_calls.h"
#include "cpu/ops/linear/linear_backward_host.h"

namespace tf {
namespace {

// dy before the activation, in shared scratch.
void go_through_activation(LinearGradients& call, const std::optional<Tensor>& preactivation,
                           int activation) {
  const char* op = "linear_backward";
  STD_TORCH_CHECK(preactivation.has_value(), op, ": an activation needs preactivation");
  check_type(op, "preactivation", *preactivation, call.input.scalar_type(), "input");
  STD_TORCH_CHECK(preactivation->sizes().equals(call.grad.sizes()), op,
                  ": preactivation must have the shape of grad");
  const Tensor z = as_contiguous(*preactivation);
  const int64_t bytes = call.m * call.n * element_bytes(element_of(z));
  void* to = bytes_of(shared_scratch(1), bytes);
  const SlopeArgs args{element_of(z), call.dy,        z.const_data_ptr(), to,
                       call.n,        call.dy_stride, activation};
  torch::stable::parallel_for(
      0, call.m, std::max<int64_t>(1, 16384 / call.n),
      [&](int64_t begin, int64_t end) { TF_DISPATCH(multiply_by_slope, args, begin, end); });
  call.dy = to;
  call.dy_stride = call.n;
}

void linear_gradients(LinearGradients& call) {
  const auto* dy = static_cast<const float*>(call.dy);
  if (call.want_input && call.k > 0)
    run_input_gradient(dy, call.dy_stride, call.weight, call.m, floats_if(true, call.grad_input),
                       0);
  if (!call.want_weight && !call.want_bias) return;
  const Rows x = as_rows(call.input);
  WeightGradientArgs args{};
  args.grad = dy;
  args.x = x.data;
  args.grad_weight = floats_if(call.want_weight, call.grad_weight);
  args.grad_bias = floats_if(call.want_bias, call.grad_bias);
  args.m = call.m;
  args.n = call.n;
  args.k = call.k;
  args.grad_stride = call.dy_stride;
  args.x_stride = x.stride;
  run_weight_gradient(args, 0);
}

// Gradients of input, weight and bias; what is not wanted comes back empty.
std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor grad, Tensor input, Tensor weight,
                                                   std::optional<Tensor> preactivation,
                                                   int64_t activation, bool want_input,
                                                   bool want_weight, bool want_bias) {
  const char* op = "linear_backward";
  const ScalarType type = is_half(input) ? input.scalar_type() : ScalarType::Float;
  check_type(op, "input", input, type, "input");
  check_type(op, "grad", grad, type, "input");
  STD_TORCH_CHECK(input.dim() >= 1 && grad.dim() == input.dim(), op,
                  ": grad and input must have the same number of dimensions, at least one");
  check_weight(op, "weight", weight, input.size(input.dim() - 1), std::nullopt, type);
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  STD_TORCH_CHECK(row_count(grad) == m && grad.size(grad.dim() - 1) == n, op,
                  ": grad must have the shape of the result");
  const Rows dy = as_rows(grad);
  LinearGradients call{m,
                       n,
                       k,
                       input,
                       weight,
                       dy.owner,
                       dy.data,
                       dy.stride,
                       want_input,
                       want_weight,
                       want_bias,
                       want_input ? fresh_rows(input, k) : fresh(input, {0}),
                       want_weight ? fresh(weight, {n, k}) : fresh(weight, {0}),
                       fresh(weight, {want_bias ? n : 0})};
  if (m == 0 || n == 0) {
    for (Tensor* tensor : {&call.grad_input, &call.grad_weight, &call.grad_bias})
      torch::stable::zero_(*tensor);
  } else {
    if (activation != 0)
      go_through_activation(call, preactivation, checked_activation(op, activation));
    is_half(input) ? half::linear_gradients(call) : linear_gradients(call);
    trim_shared_scratch();
  }
  return {call.grad_input, call.grad_weight, call.grad_bias};
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
  m.impl("cpu_linear_backward", TF_BOX(&tf::linear_backward));
}
