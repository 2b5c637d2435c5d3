// The operators cross_entropy and cross_entropy_backward.
#include <tuple>

#include "cuda/cross_entropy.cuh"
#include "cuda/operators.h"

namespace tf::cuda {
namespace {

constexpr const char* kOp = "cross_entropy";

CrossEntropyArgs describe(const Tensor& input, const Tensor& target, int64_t ignored,
                          double smoothing) {
  const Element type = element_of(kOp, input);
  STD_TORCH_CHECK(input.dim() == 2, kOp, ": input must be (rows, classes)");
  STD_TORCH_CHECK(target.dim() == 1 && target.size(0) == input.size(0) &&
                      target.scalar_type() == ScalarType::Long &&
                      target.get_device() == input.get_device(),
                  kOp, ": target must hold an int64 for each row of input, on its device");
  check_rows(kOp, input.size(0));
  return {.type = type,
          .logits = input.const_data_ptr(),
          .target = static_cast<const int64_t*>(target.const_data_ptr()),
          .rows = input.size(0),
          .columns = input.size(1),
          .row_stride = input.stride(0),
          .column_stride = input.stride(1),
          .target_stride = target.stride(0),
          .ignored = ignored,
          .smoothing = static_cast<float>(smoothing),
          .losses = nullptr,
          .lse = nullptr};
}

// Returns losses (rows), and the log-sum-exp (rows, 2) as sums of two numbers, both fp32.
std::tuple<Tensor, Tensor> cross_entropy(Tensor input, Tensor target, int64_t ignored,
                                         double smoothing) {
  CrossEntropyArgs args = describe(input, target, ignored, smoothing);
  Tensor losses = empty(input, {args.rows}, ScalarType::Float);
  Tensor lse = empty(input, {args.rows, 2}, ScalarType::Float);
  args.losses = static_cast<float*>(losses.mutable_data_ptr());
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
  const OnDevice device(input);
  launch_cross_entropy(args, device.stream);
  return {losses, lse};
}

Tensor cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor lse, int64_t ignored,
                              double smoothing) {
  CrossEntropyArgs args = describe(input, target, ignored, smoothing);
  STD_TORCH_CHECK(lse.is_contiguous() && lse.numel() == 2 * args.rows &&
                      lse.scalar_type() == ScalarType::Float &&
                      lse.get_device() == input.get_device(),
                  kOp, ": lse must be the result of the forward");
  STD_TORCH_CHECK(grad.dim() == 1 && grad.size(0) == args.rows &&
                      grad.scalar_type() == ScalarType::Float &&
                      grad.get_device() == input.get_device(),
                  kOp, ": grad must be float32, one for each row of input, on its device");
  Tensor gradient = empty(input, {args.rows, args.columns});
  args.lse = const_cast<float*>(static_cast<const float*>(lse.const_data_ptr()));
  const OnDevice device(input);
  launch_cross_entropy_backward({args, static_cast<const float*>(grad.const_data_ptr()),
                                 grad.stride(0), gradient.mutable_data_ptr()},
                                device.stream);
  return gradient;
}

}  // namespace
}  // namespace tf::cuda

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, TF_DISPATCH_KEY, m) {
  m.impl("cross_entropy.cuda", TORCH_BOX(&tf::cuda::cross_entropy));
  m.impl("cross_entropy_backward.cuda", TORCH_BOX(&tf::cuda::cross_entropy_backward));
}
