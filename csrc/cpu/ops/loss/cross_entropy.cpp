// Operators cross_entropy and cross_entropy_backward.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cpu/core/box.h"
#include "cpu/ops/loss/cross_entropy_host.h"

namespace tf {
namespace {

void check_logits(const char* op, const Tensor& input) {
  STD_TORCH_CHECK(
      input.is_cpu() && (input.scalar_type() == ScalarType::Float || is_reduced_float(input)), op,
      ": input must be float32, bfloat16 or float16, and on the CPU");
  STD_TORCH_CHECK(input.dim() == 2, op, ": input must be (rows, classes)");
}

Tensor with_adjacent_classes(const Tensor& input) {
  return input.size(1) <= 1 || input.stride(1) == 1 ? input : as_contiguous(input);
}

CrossEntropyArgs describe(const Tensor& input, const Tensor& target, int64_t ignored,
                          double smoothing) {
  CrossEntropyArgs args{};
  args.type = element_of(input);
  args.logits = input.const_data_ptr();
  args.target = static_cast<const int64_t*>(target.const_data_ptr());
  args.stride = input.stride(0);
  args.columns = args.classes = input.size(1);
  args.ignored = ignored;
  args.smoothing = static_cast<float>(smoothing);
  return args;
}

// Returns (losses; (2, rows): row maxima, log of the sums of exp(logit - row_max)), both fp32.
std::tuple<Tensor, Tensor> cross_entropy(Tensor input, Tensor target, int64_t ignored,
                                         double smoothing) {
  const char* op = "cross_entropy";
  check_logits(op, input);
  const int64_t rows = input.size(0);
  target = checked_target(op, target, rows, input.size(1), ignored);
  const Tensor x = with_adjacent_classes(input);
  Tensor losses = torch::stable::new_empty(input, {&rows, 1}, ScalarType::Float);
  const int64_t sizes[] = {2, rows};
  Tensor known = torch::stable::new_empty(input, {sizes, 2}, ScalarType::Float);
  CrossEntropyArgs args = describe(x, target, ignored, smoothing);
  CrossEntropyRows so_far(rows);
  so_far.set(args);
  run_cross_entropy(args, rows);
  float* row_maxima = static_cast<float*>(known.mutable_data_ptr());
  CrossEntropyRows::finish(args, rows, static_cast<float*>(losses.mutable_data_ptr()), row_maxima,
                           row_maxima + rows);
  return {losses, known};
}

Tensor cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor known,
                              int64_t ignored, double smoothing) {
  const char* op = "cross_entropy_backward";
  check_logits(op, input);
  const int64_t rows = input.size(0), classes = input.size(1);
  check_rows(op, grad, known, rows);
  target = checked_target(op, target, rows, classes, ignored);
  grad = as_contiguous(grad);
  known = as_contiguous(known);
  const Tensor x = with_adjacent_classes(input);
  Tensor result = empty_tensor(input, {rows, classes});
  const CrossEntropyGradientArgs args{describe(x, target, ignored, smoothing),
                                      static_cast<const float*>(known.const_data_ptr()),
                                      static_cast<const float*>(known.const_data_ptr()) + rows,
                                      static_cast<const float*>(grad.const_data_ptr()),
                                      result.mutable_data_ptr(),
                                      classes};
  run_cross_entropy_gradient(args, rows);
  return result;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cross_entropy.cpu", TF_BOX(&tf::cross_entropy));
  m.impl("cross_entropy_backward.cpu", TF_BOX(&tf::cross_entropy_backward));
}
