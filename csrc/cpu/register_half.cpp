// The CPU operators for bfloat16 and float16: checks that keep a wrong call from crashing,
// allocation, threads. register.cpp calls them; the arithmetic is in the *_half kernels.
#include <cstring>
#include <vector>

#include "cpu/gemm/half_host.h"
#include "cpu/ops/feed_forward/feed_forward_half_kernel.h"
#include "cpu/ops/pointwise/dropout_host.h"

namespace tf::half {

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

Tensor feed_forward(const Tensor& input, const Tensor& weight1,
                    const std::optional<Tensor>& packed1, const std::optional<Tensor>& bias1,
                    const Tensor& weight2, const std::optional<Tensor>& packed2,
                    const std::optional<Tensor>& bias2, int64_t activation, double dropout_p,
                    const std::optional<Tensor>& seed, Tensor* preactivation) {
  const char* op = "feed_forward";
  check_like(op, "input", input, input);
  STD_TORCH_CHECK(input.dim() >= 1, "feed_forward: input must have a dimension");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), bias1, input.scalar_type());
  check_weight(op, "weight2", weight2, weight1.size(0), bias2, input.scalar_type());
  Tensor output = fresh_rows(input, weight2.size(0));
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  if (m * n == 0) {
    if (preactivation != nullptr) torch::stable::zero_(*preactivation);
    return output;
  }
  const HalfRows x = half_rows(input);
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  run_feed_forward(
      {element_of(input), x.data, nullptr, data_of(b1), nullptr, data_of(b2),
       output.mutable_data_ptr(), m, k, f, n, x.stride, checked_activation(op, activation),
       make_dropout(op, dropout_p, seed), 0, data_of(preactivation)},
      weight1, packed1, weight2, packed2);
  trim_shared_scratch();
  return output;
}

void run_feed_forward(HalfFeedForwardArgs args, const Tensor& weight1,
                      const std::optional<Tensor>& packed1, const Tensor& weight2,
                      const std::optional<Tensor>& packed2) {
  const int64_t m = args.m, k = args.k, f = args.f, n = args.n;
  if (m < 64 * torch::stable::get_num_threads() && !args.dropout.on) {
    // Too few rows to share out: threads take columns, the small hidden block stays in cache.
    void* hidden = shared_scratch(kHiddenSlot).floats((m + 1) / 2, f);
    run_linear({args.type, args.x, nullptr, args.bias1, nullptr, hidden, m, k, f, args.x_stride, 0,
                f, args.activation, args.preactivation},
               weight1, packed1, 0);
    run_linear({args.type, hidden, nullptr, args.bias2, args.residual, args.y, m, f, n, f,
                args.residual_stride, n, 0},
               weight2, packed2, 1);
    return;
  }
  args.packed1 = panels_of(weight1, packed1, 0);
  args.packed2 = panels_of(weight2, packed2, 1);
  const int64_t tall = TF_DISPATCH(half_feed_forward_row_block, args);
  for_each_row_block(m, tall, [&](int64_t begin, int64_t end) {
    const int64_t scratch = TF_DISPATCH(half_feed_forward_scratch, args, end - begin);
    TF_DISPATCH(half_feed_forward_rows, args, begin, end, bytes_of(kernel_scratch(), scratch));
  });
}

}  // namespace tf::half
