// The operators of the feed-forward network.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/core/box.h"
#include "cpu/gemm/half_host.h"
#include "cpu/ops/feed_forward/feed_forward_half_kernel.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"
#include "cpu/ops/linear/backward_calls.h"
#include "cpu/ops/linear/linear_backward_host.h"
#include "cpu/ops/pointwise/dropout_host.h"

namespace tf {

namespace half {
namespace {

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

}  // namespace

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

}  // namespace half

namespace {

// preactivation: where x W1^T + b1 is kept for the backward, or nullptr.
Tensor feed_forward_keeping(const Tensor& input, const Tensor& weight1,
                            const std::optional<Tensor>& packed1,
                            const std::optional<Tensor>& bias1, const Tensor& weight2,
                            const std::optional<Tensor>& packed2,
                            const std::optional<Tensor>& bias2, int64_t activation,
                            double dropout_p, const std::optional<Tensor>& seed,
                            Tensor* preactivation) {
  const char* op = "feed_forward";
  check_float(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, op, ": input must have a dimension");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), bias1);
  check_weight(op, "weight2", weight2, weight1.size(0), bias2);
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  Tensor output = fresh_rows(input, n);
  if (m == 0 || (n == 0 && preactivation == nullptr)) return output;
  const Rows x = as_rows(input);
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  FeedForwardArgs args{};
  args.x = x.data;
  args.bias1 = optional_data(b1);
  args.bias2 = optional_data(b2);
  args.y = floats_if(n > 0, output);
  args.m = m;
  args.k = k;
  args.f = f;
  args.n = n;
  args.x_stride = x.stride;
  args.activation = checked_activation(op, activation);
  args.dropout = make_dropout(op, dropout_p, seed);
  if (preactivation != nullptr) args.preactivation = floats_if(true, *preactivation);
  if (!run_small_feed_forward(args, weight1, packed1, weight2, packed2, 2))
    run_feed_forward(args, panels_of(weight1, packed1, 0, m), panels_of(weight2, packed2, 1, m), 2);
  trim_shared_scratch();
  return output;
}

Tensor feed_forward(Tensor input, Tensor weight1, std::optional<Tensor> packed1,
                    std::optional<Tensor> bias1, Tensor weight2, std::optional<Tensor> packed2,
                    std::optional<Tensor> bias2, int64_t activation) {
  const auto run = is_half(input) ? half::feed_forward : feed_forward_keeping;
  return run(input, weight1, packed1, bias1, weight2, packed2, bias2, activation, 0.0, std::nullopt,
             nullptr);
}

// kept: the preactivation, empty if it is not to be kept.
std::tuple<Tensor, Tensor> feed_forward_training(Tensor input, Tensor weight1,
                                                 std::optional<Tensor> bias1, Tensor weight2,
                                                 std::optional<Tensor> bias2, int64_t activation,
                                                 double dropout_p, std::optional<Tensor> seed,
                                                 bool keep) {
  STD_TORCH_CHECK(input.dim() >= 1, "feed_forward: input must have a dimension");
  Tensor kept = keep ? fresh_rows(input, weight1.size(0)) : fresh(input, {0});
  const auto run = is_half(input) ? half::feed_forward : feed_forward_keeping;
  Tensor output = run(input, weight1, std::nullopt, bias1, weight2, std::nullopt, bias2, activation,
                      dropout_p, seed, keep ? &kept : nullptr);
  return {output, kept};
}

// Rows [begin, begin + rows), and what earlier rows gave to the sums is there already.
void backward_part(FeedForwardArgs args, FeedForwardGradients& call, const Rows& dy, const Rows& x,
                   const float* z, const Panels& panels_w2, const Panels& panels_w1, int64_t begin,
                   int64_t rows) {
  const int64_t k = args.k, f = args.f, n = args.n;
  const float* grad = dy.data + begin * dy.stride;
  FeedForwardArgs back = args;
  WeightGradientArgs sums{};
  sums.m = rows;
  sums.row = begin;
  sums.accumulate = begin > 0;
  if (call.through()) {
    back.x = grad;
    back.x_stride = dy.stride;
    back.y = call.wants[0] ? call.floats(0) + begin * k : nullptr;
    back.m = rows;
    back.k = n;
    back.n = k;
    back.row = begin;
    back.slope_at = z + begin * f;
    const bool sums_wanted = call.wants[1] || call.wants[2];
    back.hidden = sums_wanted ? shared_scratch(2).floats(rows, f) : nullptr;
    if (call.wants[3])
      back.panels = shared_scratch(4).floats(TF_DISPATCH(weight_gradient_panels, rows, f));
    run_feed_forward(back, panels_w2, panels_w1, 3);
    if (sums_wanted) {
      sums.grad = back.hidden;
      sums.grad_stride = f;
      sums.x = x.data + begin * x.stride;
      sums.x_stride = x.stride;
      sums.n = f;
      sums.k = k;
      sums.grad_weight = call.floats(1);
      sums.grad_bias = call.floats(2);
      run_weight_gradient_part(sums, 3);
    }
  }
  if (call.wants[3] || call.wants[4]) {
    sums.grad = grad;
    sums.grad_stride = dy.stride;
    sums.x = z + begin * f;
    sums.x_stride = f;
    sums.n = n;
    sums.k = f;
    sums.grad_weight = call.floats(3);
    sums.grad_bias = call.floats(4);
    sums.activation = args.activation;
    sums.dropout = args.dropout;
    sums.panels = back.panels;
    run_weight_gradient_part(sums, 3);
  }
}

// The same for few rows, product by product.
void backward_few(FeedForwardGradients& call, const Rows& dy, const Rows& x, const float* z) {
  const int64_t m = call.m, k = call.k, f = call.f, n = call.n;
  float* grad = shared_scratch(2).floats(m, f);  // of hidden units, then of z
  float* hidden = shared_scratch(3).floats(m, f);
  if (call.through()) run_input_gradient(dy.data, dy.stride, call.weight2, m, grad, 0);
  // What nobody wants of the two is worked out from what the scratch holds; it is not looked at.
  const FewMiddleArgs middle{
      z, grad, call.wants[3] ? hidden : nullptr, f, call.activation, call.dropout};
  if (call.through() || call.wants[3])
    torch::stable::parallel_for(0, m, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, f)),
                                [&](int64_t begin, int64_t end) {
                                  TF_DISPATCH(few_middle, middle, begin, end,
                                              kernel_scratch().floats(f + 64));
                                });
  if (call.wants[0]) run_input_gradient(grad, f, call.weight1, m, call.floats(0), 0);
  WeightGradientArgs sums{};
  sums.m = m;
  sums.grad = grad;
  sums.grad_stride = f;
  sums.x = x.data;
  sums.x_stride = x.stride;
  sums.n = f;
  sums.k = k;
  sums.grad_weight = call.floats(1);
  sums.grad_bias = call.floats(2);
  run_weight_gradient_part(sums, 0);
  sums.grad = dy.data;
  sums.grad_stride = dy.stride;
  sums.x = hidden;
  sums.x_stride = f;
  sums.n = n;
  sums.k = f;
  sums.grad_weight = call.floats(3);
  sums.grad_bias = call.floats(4);
  run_weight_gradient_part(sums, 0);
}

void feed_forward_gradients(FeedForwardGradients& call) {
  const Rows dy = as_rows(call.grad), x = as_rows(call.input);
  const auto* z = static_cast<const float*>(call.preactivation.const_data_ptr());
  if (call.f > 0 && is_few_backward(call.weight1, call.m) && is_few_backward(call.weight2, call.m))
    return backward_few(call, dy, x, z);
  FeedForwardArgs args{};
  args.k = call.k;
  args.f = call.f;
  args.n = call.n;
  args.activation = call.activation;
  args.dropout = call.dropout;
  Panels panels_w2, panels_w1;
  if (call.through()) panels_w2 = column_panels_of(call.weight2, 0, call.m);
  if (call.wants[0]) panels_w1 = column_panels_of(call.weight1, 1, call.m);
  const int64_t most = weight_gradient_part_rows(std::max(call.k, call.f));
  for (int64_t begin = 0; begin < call.m; begin += most)
    backward_part(args, call, dy, x, z, panels_w2, panels_w1, begin,
                  std::min(most, call.m - begin));
}

// Gradients of input, weight1, bias1, weight2 and bias2; what is not wanted comes back empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> feed_forward_backward(
    Tensor grad, Tensor input, Tensor weight1, Tensor weight2, Tensor preactivation,
    int64_t activation, double dropout_p, std::optional<Tensor> seed, bool want_input,
    bool want_weight1, bool want_bias1, bool want_weight2, bool want_bias2) {
  const char* op = "feed_forward_backward";
  const ScalarType type = is_half(input) ? input.scalar_type() : ScalarType::Float;
  check_type(op, "input", input, type, "input");
  check_type(op, "grad", grad, type, "input");
  check_type(op, "preactivation", preactivation, type, "input");
  STD_TORCH_CHECK(input.dim() >= 1 && grad.dim() == input.dim(), op,
                  ": grad and input must have the same number of dimensions, at least one");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), std::nullopt, type);
  check_weight(op, "weight2", weight2, weight1.size(0), std::nullopt, type);
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  STD_TORCH_CHECK(row_count(grad) == m && grad.size(grad.dim() - 1) == n, op,
                  ": grad must have the shape of the result");
  STD_TORCH_CHECK(preactivation.numel() == m * f, op,
                  ": preactivation must have one value per row and hidden unit");
  FeedForwardGradients call{m,
                            k,
                            f,
                            n,
                            grad,
                            input,
                            weight1,
                            weight2,
                            as_contiguous(preactivation),
                            checked_activation(op, activation),
                            make_dropout(op, dropout_p, seed),
                            {want_input, want_weight1, want_bias1, want_weight2, want_bias2},
                            {want_input ? fresh_rows(input, k) : fresh(input, {0}),
                             want_weight1 ? fresh(weight1, {f, k}) : fresh(weight1, {0}),
                             fresh(weight1, {want_bias1 ? f : 0}),
                             want_weight2 ? fresh(weight2, {n, f}) : fresh(weight2, {0}),
                             fresh(weight2, {want_bias2 ? n : 0})}};
  auto& [grad_input, grad_weight1, grad_bias1, grad_weight2, grad_bias2] = call.results;
  if (m == 0 || n == 0) {
    for (Tensor& tensor : call.results) torch::stable::zero_(tensor);
  } else {
    is_half(input) ? half::feed_forward_gradients(call) : feed_forward_gradients(call);
    trim_shared_scratch();
  }
  return {grad_input, grad_weight1, grad_bias1, grad_weight2, grad_bias2};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("feed_forward.cpu", TF_BOX(&tf::feed_forward));
  m.impl("feed_forward_training.cpu", TF_BOX(&tf::feed_forward_training));
  m.impl("feed_forward_backward.cpu", TF_BOX(&tf::feed_forward_backward));
}
