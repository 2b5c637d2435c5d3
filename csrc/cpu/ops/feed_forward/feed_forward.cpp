// Operators of the feed-forward network.
#include "cpu/ops/feed_forward/feed_forward.h"

#include <tuple>

#include "cpu/core/host.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"
#include "cpu/ops/int8_linear/int8_linear.h"
#include "kernel_table.h"

namespace tf {
namespace {

// Unfused, for few rows: first(args), then second(args). Threads share the columns of each layer,
// and the small hidden block, in shared scratch `slot`, stays in cache.
template <class First, class Second>
void feed_forward_unfused(const FeedForwardArgs& args, Element hidden_type, int slot,
                          const First& first, const Second& second) {
  const bool after = args.type == Element::float32 && trains(args);
  const int64_t floats_of_rows = hidden_type == Element::float32 ? args.m : (args.m + 1) / 2;
  float* hidden = shared_scratch(slot).floats(floats_of_rows, args.f);
  first(LinearArgs{.type = args.type,
                   .x = args.x,
                   .packed = nullptr,
                   .bias = args.bias1,
                   .residual = nullptr,
                   .y = hidden,
                   .m = args.m,
                   .k = args.k,
                   .n = args.f,
                   .x_stride = args.x_stride,
                   .residual_stride = 0,
                   .y_stride = args.f,
                   .activation = after ? kIdentity : args.activation,
                   .preactivation = after ? nullptr : args.preactivation,
                   .scale = args.scale1,
                   .factors = args.factors1});
  if (after) {
    const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, args.f));
    parallel_for(0, args.m, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(feed_forward_hidden, args, hidden, begin, end);
    });
  }
  // If only the hidden units are wanted, there is no second weight.
  if (args.y != nullptr)
    second(LinearArgs{.type = args.type,
                      .x = hidden,
                      .packed = nullptr,
                      .bias = args.bias2,
                      .residual = args.residual,
                      .y = args.y,
                      .m = args.m,
                      .k = args.f,
                      .n = args.n,
                      .x_stride = args.f,
                      .residual_stride = args.residual_stride,
                      .y_stride = args.n,
                      .activation = kIdentity,
                      .scale = args.scale2,
                      .factors = args.factors2});
}

// The choice of kernels and of blocks for a network.
struct FeedForwardPlan {
  // Fused: this many blocks of rows, each through both layers. nullptr: two linear layers.
  const FeedForwardKernels* fused = nullptr;
  int64_t blocks = 0;
};

FeedForwardPlan fused_plan(const FeedForwardKernels* fused, const FeedForwardArgs& args) {
  const int64_t threads = torch::stable::get_num_threads(), max_rows = fused->row_block(args);
  const int64_t wanted = ((args.m + max_rows - 1) / max_rows + threads - 1) / threads * threads;
  // At least 4 rows a block: tiles of one or two rows add in another order, and results must not
  // depend on the number of threads.
  return {fused, std::min(wanted, std::max<int64_t>(1, args.m / 4))};
}

// layouts() returns the layouts of the two packed weights. Only the plan for many rows of fp32
// depends on them. The thresholds were measured.
template <class Layouts>
FeedForwardPlan choose_feed_forward(const FeedForwardArgs& args, const Layouts& layouts) {
  const int64_t threads = torch::stable::get_num_threads();
  FeedForwardPlan plan;
  if (args.type != Element::float32) {
    // Only the fused kernel has dropout and the backward.
    if (args.m < 64 * threads && !args.dropout.on && args.slope_at == nullptr) return plan;
    plan.fused = TF_DISPATCH_TO(product_isa(args.type), lowp_feed_forward_kernels, args.type);
  } else {
    if (args.m < 56 * threads || splits_panels(args.m)) return plan;
    const auto [first, second] = layouts();
    if (args.y != nullptr && first->in_fp32 != second->in_fp32) return plan;
    if (first->in_fp32) plan.fused = TF_DISPATCH(feed_forward_kernels, );
#if TF_HAVE_AMX
    else
      plan.fused = amx::bf16x3_feed_forward_kernels();
#endif
  }
  return fused_plan(plan.fused, args);
}

// Whether a network without packed copies of its weights runs as two linear layers: with few rows
// these pack a panel or a strip at a time.
bool reads_unpacked(const FeedForwardArgs& args) {
  if (args.type == Element::float32) return reads_strips(args.type, args.m);
  return args.m < 256 && !args.dropout.on;  // only the fused kernel drops units
}

// For 8-bit weights. Only float32 may run unfused: linear layers of float16 cannot return bfloat16.
FeedForwardPlan choose_int8_feed_forward(const FeedForwardArgs& args) {
  if (args.type == Element::float32 && args.m < 64 * torch::stable::get_num_threads()) return {};
  return fused_plan(TF_DISPATCH(int8_feed_forward_kernels, args.type), args);
}

void run_blocks(const FeedForwardPlan& plan, const FeedForwardArgs& args) {
  for_each_item(plan.blocks, [&](int64_t item) {
    const int64_t begin = row_of_part(args.m, item, plan.blocks, plan.fused->row_unit);
    const int64_t end = row_of_part(args.m, item + 1, plan.blocks, plan.fused->row_unit);
    if (begin == end) return;
    plan.fused->rows(args, begin, end,
                     bytes_of(kernel_scratch(), plan.fused->scratch(args, end - begin)));
  });
}

FeedForwardArgs with_panels(FeedForwardArgs args, const Panels& panels1, const Panels& panels2) {
  args.packed1 = panels1.data;
  args.packed2 = panels2.data;
  return args;
}

}  // namespace

void run_int8_feed_forward(FeedForwardArgs args, int slot) {
  const FeedForwardPlan plan = choose_int8_feed_forward(args);
  if (plan.fused != nullptr) return run_blocks(plan, args);
  const Element type = args.type, hidden = Element::bfloat16;
  args.activation = coarse(args.activation);  // as in the fused kernel
  feed_forward_unfused(
      args, hidden, slot,
      [&](const LinearArgs& linear) {
        run_linear(linear, {TF_DISPATCH(int8_linear_kernels, type, type, hidden), args.packed1});
      },
      [&](const LinearArgs& linear) {
        run_linear(linear, {TF_DISPATCH(int8_linear_kernels, type, hidden, type), args.packed2});
      });
}

void run_feed_forward(FeedForwardArgs args, const Matrix& weight1,
                      const std::optional<Tensor>& packed1, const Matrix& weight2,
                      const std::optional<Tensor>& packed2, int slot) {
  FeedForwardPlan plan;
  if (packed1 || packed2 || !reads_unpacked(args))
    plan = choose_feed_forward(args, [&] {
      return std::pair(kernels_of(weight1, packed1, args.m), kernels_of(weight2, packed2, args.m));
    });
  if (plan.fused != nullptr)
    return run_blocks(plan, with_panels(args, panels_of(weight1, packed1, 0, args.m),
                                        panels_of(weight2, packed2, 1, args.m)));
  feed_forward_unfused(
      args, args.type, slot,
      [&](const LinearArgs& linear) { run_linear(linear, weight1, packed1, 0); },
      [&](const LinearArgs& linear) { run_linear(linear, weight2, packed2, 1); });
}

namespace {

// preactivation: receives x W1^T + b1 for the backward, or nullptr.
Tensor feed_forward_impl(const Tensor& input, const Tensor& weight1,
                         const std::optional<Tensor>& packed1, const std::optional<Tensor>& bias1,
                         const Tensor& weight2, const std::optional<Tensor>& packed2,
                         const std::optional<Tensor>& bias2, int64_t activation, double dropout_p,
                         const std::optional<Tensor>& seed, Tensor* preactivation) {
  const char* op = "feed_forward";
  const ScalarType type = checked_float_type(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, op, ": input must have a dimension");
  check_weight(op, "weight1", weight1, input.size(input.dim() - 1), bias1, type);
  check_weight(op, "weight2", weight2, weight1.size(0), bias2, type);
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  Tensor output = empty_rows(input, n);
  if (m == 0 || (n == 0 && preactivation == nullptr)) return output;
  const Rows x = as_rows(input);
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  run_feed_forward(
      {.type = element_of(input),
       .x = x.data,
       .bias1 = data_of(b1),
       .bias2 = data_of(b2),
       .y = data_if(n > 0, output),
       .m = m,
       .k = k,
       .f = f,
       .n = n,
       .x_stride = x.stride,
       .activation = checked_activation(op, activation),
       .dropout = make_dropout(op, dropout_p, seed),
       .preactivation = preactivation == nullptr ? nullptr : preactivation->mutable_data_ptr()},
      weight1, packed1, weight2, packed2, 2);
  trim_shared_scratch();
  return output;
}

Tensor feed_forward(Tensor input, Tensor weight1, std::optional<Tensor> packed1,
                    std::optional<Tensor> bias1, Tensor weight2, std::optional<Tensor> packed2,
                    std::optional<Tensor> bias2, int64_t activation) {
  return feed_forward_impl(input, weight1, packed1, bias1, weight2, packed2, bias2, activation, 0.0,
                           std::nullopt, nullptr);
}

// Also returns the preactivation for the backward, empty without `keep`.
std::tuple<Tensor, Tensor> feed_forward_training(Tensor input, Tensor weight1,
                                                 std::optional<Tensor> bias1, Tensor weight2,
                                                 std::optional<Tensor> bias2, int64_t activation,
                                                 double dropout_p, std::optional<Tensor> seed,
                                                 bool keep) {
  STD_TORCH_CHECK(input.dim() >= 1, "feed_forward: input must have a dimension");
  Tensor saved = keep ? empty_rows(input, weight1.size(0)) : empty_tensor(input, {0});
  Tensor output = feed_forward_impl(input, weight1, std::nullopt, bias1, weight2, std::nullopt,
                                    bias2, activation, dropout_p, seed, keep ? &saved : nullptr);
  return {output, saved};
}

// Computes the gradients of y = dropout(act(x W1^T + b1)) W2^T + b2; m and n are positive.
struct Gradients : FeedForwardBackwardArgs {
  Matrix first_weight() const { return {type, weight1, f, k, weight1_stride}; }
  Matrix second_weight() const { return {type, weight2, n, f, weight2_stride}; }
  // Whether any wanted gradient depends on the gradient of z = x W1^T + b1.
  bool needs_grad_z() const { return results[0] || results[1] || results[2]; }
  WeightGradientArgs first() const {
    return {.type = type,
            .x = x,
            .grad_weight = results[1],
            .grad_bias = results[2],
            .m = m,
            .n = f,
            .k = k,
            .grad_stride = f,
            .x_stride = x_stride};
  }
  WeightGradientArgs second() const {
    return {.type = type,
            .grad = grad,
            .grad_weight = results[3],
            .grad_bias = results[4],
            .m = m,
            .n = n,
            .k = f,
            .grad_stride = grad_stride,
            .x_stride = f};
  }
};

// Computes the gradients as those of two linear layers.
void backward_unfused(const Gradients& call) {
  const int64_t m = call.m, f = call.f, rows = call.type == Element::float32 ? m : (m + 1) / 2;
  void* grad = shared_scratch(2).floats(rows, f);  // of the hidden units, then of z
  void* hidden = shared_scratch(3).floats(rows, f);
  if (call.needs_grad_z())
    run_input_gradient(call.grad, call.grad_stride, call.second_weight(), m, grad, 0);
  // A result that is not wanted is computed from uninitialised scratch and ignored.
  const bool second = call.results[3] != nullptr;
  const HiddenBackwardArgs middle{call.type,       call.z,      grad, second ? hidden : nullptr, f,
                                  call.activation, call.dropout};
  if (call.needs_grad_z() || second)
    parallel_for(0, m, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, f)),
                 [&](int64_t begin, int64_t end) {
                   TF_DISPATCH(hidden_backward, middle, begin, end,
                               kernel_scratch().floats(f + 64));
                 });
  if (call.results[0]) run_input_gradient(grad, f, call.first_weight(), m, call.results[0], 0);
  WeightGradientArgs sums1 = call.first(), sums2 = call.second();
  float* place = shared_scratch(4).floats(f + call.n);
  set_sums(sums1, place, false);
  set_sums(sums2, place + f, false);
  sums1.grad = grad;
  run_weight_gradient_part(sums1, 0);
  sums2.x = hidden;
  run_weight_gradient_part(sums2, 0);
}

// With few rows packing whole weights takes longer than the products. In low precision the gradient
// of the hidden units is rounded, as between linear layers; with more rows it is not.
bool runs_unfused(const Gradients& call) {
  if (call.f == 0) return false;
  if (call.type != Element::float32) return call.m <= 64;
  return is_direct_backward(call.type, call.m, call.f, std::max(call.k, call.n));
}

void feed_forward_gradients(const Gradients& call) {
  if (runs_unfused(call)) return backward_unfused(call);
  const int64_t m = call.m, k = call.k, f = call.f, n = call.n;
  const Element type = call.type;
  const int64_t max_rows = weight_gradient_part_rows(type, std::max(k, f));
  const bool in_fp32 = type == Element::float32, first = call.results[1] || call.results[2];
  const bool second = call.results[3] != nullptr, through = call.needs_grad_z();
  // fp32 recomputes the hidden units by themselves if nothing else is wanted.
  const bool back_wanted = through || (!in_fp32 && second);
  Panels panels2, panels1;
  if (back_wanted) panels2 = column_panels_of(call.second_weight(), 0, m);
  if (call.results[0]) panels1 = column_panels_of(call.first_weight(), 1, m);
  WeightGradientArgs sums1 = call.first(), sums2 = call.second();
  if (!in_fp32) {
    const bool parts = max_rows < m;
    const int64_t floats = sum_floats(sums1, parts);
    float* place = shared_scratch(5).floats(floats + sum_floats(sums2, parts));
    set_sums(sums1, place, parts);
    set_sums(sums2, place + floats, parts);
  }
  for (int64_t begin = 0; begin < m; begin += max_rows) {
    const int64_t rows = std::min(max_rows, m - begin);
    const void* z = offset_ptr(call.z, type, begin * f);
    const void* dy = offset_ptr(call.grad, type, begin * call.grad_stride);
    sums1.m = sums2.m = rows;
    sums1.row = sums2.row = begin;
    sums1.first = sums2.first = begin == 0;
    sums1.last = sums2.last = begin + rows == m;
    if (back_wanted) {
      FeedForwardArgs back{.type = type,
                           .x = dy,
                           .y = offset_ptr(call.results[0], type, begin * k),
                           .m = rows,
                           .k = n,
                           .f = f,
                           .n = k,
                           .x_stride = call.grad_stride,
                           .activation = call.activation,
                           .dropout = call.dropout,
                           .row = begin,
                           .slope_at = z};
      if (first) back.hidden = shared_scratch(2).floats(in_fp32 ? rows : (rows + 1) / 2, f);
      if (second) sums2.panels = back.panels = weight_gradient_panels(type, rows, f, 4);
      const FeedForwardPlan forward =
          choose_feed_forward(back, [&] { return std::pair(panels2.kernels, panels1.kernels); });
      if (forward.fused != nullptr) {
        run_blocks(forward, with_panels(back, panels2, panels1));
      } else {
        feed_forward_unfused(
            back, type, 3, [&](const LinearArgs& linear) { run_linear(linear, panels2); },
            [&](const LinearArgs& linear) { run_linear(linear, panels1); });
      }
      if (first) {
        sums1.grad = back.hidden;
        sums1.x = offset_ptr(call.x, type, begin * call.x_stride);
        run_weight_gradient_part(sums1, 3);
      }
    }
    if (second || call.results[4]) {
      sums2.grad = dy;
      sums2.x = z;
      sums2.activation = call.activation;
      sums2.dropout = call.dropout;
      run_weight_gradient_part(sums2, 3);
    }
  }
}

}  // namespace

void run_feed_forward(const FeedForwardArgs& args, const void* weight1, const void* weight2) {
  run_feed_forward(args, Matrix{args.type, weight1, args.f, args.k, args.k}, std::nullopt,
                   Matrix{args.type, weight2, args.n, args.f, args.f}, std::nullopt, 2);
  trim_shared_scratch();
}

void run_feed_forward_backward(const FeedForwardBackwardArgs& args) {
  feed_forward_gradients({args});
  trim_shared_scratch();
}

namespace {

// Gradients of input, weight1, bias1, weight2 and bias2; empty where not wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> feed_forward_backward(
    Tensor grad, Tensor input, Tensor weight1, Tensor weight2, Tensor preactivation,
    int64_t activation, double dropout_p, std::optional<Tensor> seed, bool want_input,
    bool want_weight1, bool want_bias1, bool want_weight2, bool want_bias2) {
  const char* op = "feed_forward_backward";
  const ScalarType type = checked_float_type(op, "input", input);
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
  const Tensor z = as_contiguous(preactivation);
  const bool wants[] = {want_input, want_weight1, want_bias1, want_weight2, want_bias2};
  Tensor results[] = {want_input ? empty_rows(input, k) : empty_tensor(input, {0}),
                      want_weight1 ? empty_tensor(weight1, {f, k}) : empty_tensor(weight1, {0}),
                      empty_tensor(weight1, {want_bias1 ? f : 0}),
                      want_weight2 ? empty_tensor(weight2, {n, f}) : empty_tensor(weight2, {0}),
                      empty_tensor(weight2, {want_bias2 ? n : 0})};
  if (m == 0 || n == 0) {
    for (Tensor& tensor : results) torch::stable::zero_(tensor);
    return {results[0], results[1], results[2], results[3], results[4]};
  }
  const Rows dy = as_rows(grad), x = as_rows(input);
  const Matrix w1 = Matrix(weight1).adjacent(), w2 = Matrix(weight2).adjacent();
  FeedForwardBackwardArgs call{.type = element_of(input),
                               .grad = dy.data,
                               .x = x.data,
                               .weight1 = w1.data,
                               .weight2 = w2.data,
                               .z = z.const_data_ptr(),
                               .m = m,
                               .k = k,
                               .f = f,
                               .n = n,
                               .grad_stride = dy.stride,
                               .x_stride = x.stride,
                               .weight1_stride = w1.stride,
                               .weight2_stride = w2.stride,
                               .activation = checked_activation(op, activation),
                               .dropout = make_dropout(op, dropout_p, seed),
                               .results = {}};
  for (int i = 0; i < 5; ++i) call.results[i] = data_if(wants[i], results[i]);
  run_feed_forward_backward(call);
  return {results[0], results[1], results[2], results[3], results[4]};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("feed_forward_packed.cpu", TF_BOX(&tf::feed_forward));
  m.impl("feed_forward_training.cpu", TF_BOX(&tf::feed_forward_training));
  m.impl("feed_forward_backward.cpu", TF_BOX(&tf::feed_forward_backward));
}
