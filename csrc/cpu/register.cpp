// The CPU operators: schemas, checks that keep a wrong call from crashing, allocation, threads.
// What a call means is checked above, in transformer_fast/functional; the arithmetic is in the
// kernels.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cpu/core/box.h"
#include "cpu/core/host.h"
#include "cpu/gemm/half_ops.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"
#include "cpu/ops/linear/linear_host.h"
#include "cpu/ops/pointwise/dropout_host.h"

namespace tf {
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
  if (is_half(input)) return half::linear(input, weight, packed, bias, residual, activation);
  return linear_keeping(input, weight, packed, bias, residual, activation, nullptr);
}

std::tuple<Tensor, Tensor> linear_with_preactivation(Tensor input, Tensor weight,
                                                     std::optional<Tensor> bias,
                                                     std::optional<Tensor> residual,
                                                     int64_t activation) {
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  Tensor preactivation = fresh_rows(input, weight.size(0));
  const auto run = is_half(input) ? half::linear : linear_keeping;
  Tensor output = run(input, weight, std::nullopt, bias, residual, activation, &preactivation);
  return {output, preactivation};
}

Tensor feed_forward(Tensor input, Tensor weight1, std::optional<Tensor> packed1,
                    std::optional<Tensor> bias1, Tensor weight2, std::optional<Tensor> packed2,
                    std::optional<Tensor> bias2, int64_t activation) {
  if (is_half(input))
    return half::feed_forward(input, weight1, packed1, bias1, weight2, packed2, bias2, activation);
  const char* op = "feed_forward";
  check_float(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, "feed_forward: input must have a dimension");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), bias1);
  check_weight(op, "weight2", weight2, weight1.size(0), bias2);
  Tensor output = fresh_rows(input, weight2.size(0));
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  float* y = static_cast<float*>(output.mutable_data_ptr());
  const FeedForwardArgs args{x.data,
                             nullptr,
                             optional_data(b1),
                             nullptr,
                             optional_data(b2),
                             y,
                             m,
                             k,
                             f,
                             n,
                             x.stride,
                             checked_activation(op, activation)};
  if (!run_small_feed_forward(args, weight1, packed1, weight2, packed2, 2))
    run_feed_forward(args, panels_of(weight1, packed1, 0, m), panels_of(weight2, packed2, 1, m), 2);
  trim_shared_scratch();
  return output;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def("cpu_pack_weight(Tensor weight, int rows) -> Tensor");
  m.def(
      "cpu_linear(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor? residual, int "
      "activation) -> "
      "Tensor");
  m.def(
      "cpu_linear_with_preactivation(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int activation) -> (Tensor output, Tensor preactivation)");
  m.def(
      "cpu_feed_forward(Tensor input, Tensor weight1, Tensor? packed1, Tensor? bias1, "
      "Tensor weight2, Tensor? packed2, Tensor? bias2, int activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_pack_weight", TF_BOX(&tf::pack_weight));
  m.impl("cpu_linear", TF_BOX(&tf::linear));
  m.impl("cpu_linear_with_preactivation", TF_BOX(&tf::linear_with_preactivation));
  m.impl("cpu_feed_forward", TF_BOX(&tf::feed_forward));
}
