// The operators of linear maps, and packed weights.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "cpu/core/box.h"
#include "cpu/gemm/half_host.h"
#include "cpu/ops/linear/backward_calls.h"
#include "cpu/ops/linear/linear_backward_host.h"

namespace tf {

namespace half {
namespace {

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

}  // namespace
}  // namespace half

namespace {

// A copy of a weight for products of that many rows.
Tensor pack_weight(Tensor weight, int64_t rows) {
  if (is_half(weight)) return half::pack_weight(weight);
  check_float("pack_weight", "weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2, "pack_weight: weight must be a matrix");
  return packs_pieces(rows) ? pack_pieces(weight) : pack_whole(weight);
}

float* mutable_data(Tensor* tensor) {
  return tensor == nullptr ? nullptr : static_cast<float*>(tensor->mutable_data_ptr());
}

// preactivation: where x W^T + bias is kept for the backward, or nullptr.
Tensor linear_keeping(const Tensor& input, const Tensor& weight,
                      const std::optional<Tensor>& packed, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, int64_t activation,
                      Tensor* preactivation) {
  check_float("linear", "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  check_weight("linear", "weight", weight, input.size(input.dim() - 1), bias);
  Tensor output = fresh_rows(input, weight.size(0));
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  if (residual) {
    check_float("linear", "residual", *residual);
    STD_TORCH_CHECK(residual->sizes().equals(output.sizes()),
                    "linear: residual must have the shape of the result");
  }
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const Rows r = residual ? as_rows(*residual) : Rows{input, nullptr, 0, 0, 0};
  const std::optional<Tensor> b = as_contiguous(bias);
  run_linear({x.data, nullptr, optional_data(b), r.data,
              static_cast<float*>(output.mutable_data_ptr()), m, k, n, x.stride, r.stride, n,
              checked_activation("linear", activation), mutable_data(preactivation)},
             weight, packed, 0);
  trim_shared_scratch();
  return output;
}

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> packed, std::optional<Tensor> bias,
              std::optional<Tensor> residual, int64_t activation) {
  const auto run = is_half(input) ? half::linear : linear_keeping;
  return run(input, weight, packed, bias, residual, activation, nullptr);
}

std::tuple<Tensor, Tensor> linear_training(Tensor input, Tensor weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> residual, int64_t activation,
                                           bool keep) {
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  Tensor preactivation = keep ? fresh_rows(input, weight.size(0)) : fresh(input, {0});
  const auto run = is_half(input) ? half::linear : linear_keeping;
  Tensor output =
      run(input, weight, std::nullopt, bias, residual, activation, keep ? &preactivation : nullptr);
  return {output, preactivation};
}

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
  m.def("cpu_pack_weight(Tensor weight, int rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_pack_weight", TF_BOX(&tf::pack_weight));
  m.impl("linear.cpu", TF_BOX(&tf::linear));
  m.impl("linear_training.cpu", TF_BOX(&tf::linear_training));
  m.impl("linear_backward.cpu", TF_BOX(&tf::linear_backward));
}
