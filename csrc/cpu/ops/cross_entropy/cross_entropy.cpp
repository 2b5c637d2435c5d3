// Operators of the cross entropy of logits, and of that of a linear layer's results.
#include "cpu/ops/cross_entropy/cross_entropy.h"

#include <tuple>
#include <vector>

#include "cpu/ops/linear/linear_host.h"

namespace tf {
namespace {

// Checks that there is a target for each row of `input`: a class or `ignored`.
Tensor checked_target(const char* op, const Tensor& target, const Tensor& input, int64_t classes,
                      int64_t ignored) {
  const auto rows = input.sizes().slice(0, static_cast<size_t>(input.dim() - 1));
  STD_TORCH_CHECK(
      target.is_cpu() && target.scalar_type() == ScalarType::Long && target.sizes().equals(rows),
      op, ": target must be int64, on the CPU, and have the leading shape of input");
  const Tensor flat = as_contiguous(target);
  const auto* data = static_cast<const int64_t*>(flat.const_data_ptr());
  for (int64_t i = 0, count = flat.numel(); i < count; ++i)
    STD_TORCH_CHECK(
        static_cast<uint64_t>(data[i]) < static_cast<uint64_t>(classes) || data[i] == ignored,
        "Target ", data[i], " is out of bounds.");
  return flat;
}

// Checks the inputs of the backward per row: gradient of the loss, and two statistics saved by the
// forward.
void check_rows(const char* op, const Tensor& grad, const Tensor& statistics,
                const Tensor& target) {
  check_float(op, "grad", grad);
  check_float(op, "statistics", statistics);
  STD_TORCH_CHECK(grad.sizes().equals(target.sizes()), op, ": grad must have the shape of target");
  STD_TORCH_CHECK(statistics.numel() == 2 * target.numel(), op,
                  ": statistics must have two values per row");
}

int64_t cross_entropy_grain(int64_t columns) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, columns));
}

void run_cross_entropy(const CrossEntropyArgs& args, int64_t rows) {
  parallel_for(0, rows, cross_entropy_grain(args.columns), [&](int64_t begin, int64_t end) {
    TF_DISPATCH(cross_entropy_rows, args, begin, end);
  });
}

void run_cross_entropy_gradient(const CrossEntropyGradientArgs& args, int64_t rows) {
  parallel_for(0, rows, cross_entropy_grain(args.call.columns), [&](int64_t begin, int64_t end) {
    TF_DISPATCH(cross_entropy_gradient_rows, args, begin, end);
  });
}

// Rows of logits that the kernels can read: a view of `input`, or of a contiguous copy.
struct LogitsRows {
  Tensor owner;
  LogitsLayout layout;
  int64_t group_rows, rows, classes;
  bool planes;  // of classes, which the gradient has, too
};

LogitsRows logits_rows(const char* op, const Tensor& input) {
  checked_float_type(op, "input", input);
  const int64_t dims = input.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, op,
                  ": input must be (rows, classes) or (groups, rows, classes)");
  const int64_t groups = dims == 3 ? input.size(0) : 1, in_group = input.size(dims - 2);
  const int64_t classes = input.size(dims - 1);
  LogitsRows found{input, {}, std::max<int64_t>(1, in_group), groups * in_group, classes, false};
  found.layout = {input.stride(dims - 2), classes == 1 ? 1 : input.stride(dims - 1),
                  dims == 3 ? input.stride(0) : 0};
  found.planes = dims == 3 && input.stride(1) < input.stride(2);
  if (found.layout.column != 1 && found.layout.row != 1) {
    found.owner = torch::stable::contiguous(input);
    found.layout = {classes, 1, in_group * classes};
  }
  // Equidistant rows are one group.
  if (!found.planes && found.layout.group == in_group * found.layout.row)
    found.group_rows = found.rows;
  return found;
}

// True for one expanded value, as autograd passes for losses that are summed.
bool is_expanded(const Tensor& grad) {
  for (const int64_t stride : grad.strides())
    if (stride != 0) return false;
  return true;
}

CrossEntropyArgs describe(const LogitsRows& x, const Tensor& target, int64_t ignored,
                          double smoothing) {
  CrossEntropyArgs args{};
  args.type = element_of(x.owner);
  args.logits = x.owner.const_data_ptr();
  args.layout = x.layout;
  args.group_rows = x.group_rows;
  args.target = static_cast<const int64_t*>(target.const_data_ptr());
  args.columns = args.classes = x.classes;
  args.ignored = ignored;
  args.smoothing = static_cast<float>(smoothing);
  return args;
}

// Returns (losses; for each row the largest logit and the log of the sum of exp(logit - largest)),
// both fp32.
std::tuple<Tensor, Tensor> cross_entropy(Tensor input, Tensor target, int64_t ignored,
                                         double smoothing) {
  const char* op = "cross_entropy";
  const LogitsRows x = logits_rows(op, input);
  target = checked_target(op, target, input, x.classes, ignored);
  Tensor losses = empty_tensor(input, target.sizes(), true);
  std::vector<int64_t> sizes(target.sizes().begin(), target.sizes().end());
  sizes.push_back(2);
  Tensor statistics = empty_tensor(input, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), true);
  CrossEntropyArgs args = describe(x, target, ignored, smoothing);
  args.losses = static_cast<float*>(losses.mutable_data_ptr());
  args.statistics = static_cast<float*>(statistics.mutable_data_ptr());
  run_cross_entropy(args, x.rows);
  return {losses, statistics};
}

// The gradient lies in memory as the input does: groups that are planes of classes stay so.
Tensor cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor statistics,
                              int64_t ignored, double smoothing) {
  const char* op = "cross_entropy_backward";
  const LogitsRows x = logits_rows(op, input);
  target = checked_target(op, target, input, x.classes, ignored);
  check_rows(op, grad, statistics, target);
  const bool expanded = is_expanded(grad);
  if (!expanded) grad = as_contiguous(grad);
  statistics = as_contiguous(statistics);
  CrossEntropyArgs args = describe(x, target, ignored, smoothing);
  args.statistics = static_cast<float*>(statistics.mutable_data_ptr());
  const int64_t in_group = input.size(input.dim() - 2);
  Tensor result = x.planes ? empty_tensor(input, {input.size(0), x.classes, in_group})
                           : empty_tensor_like(input);
  const LogitsLayout layout = x.planes ? LogitsLayout{1, in_group, in_group * x.classes}
                                       : LogitsLayout{x.classes, 1, x.group_rows * x.classes};
  const auto* scale = static_cast<const float*>(grad.const_data_ptr());
  run_cross_entropy_gradient({args, scale, expanded ? 0 : 1, result.mutable_data_ptr(), layout},
                             x.rows);
  return x.planes ? torch::stable::transpose(result, 1, 2) : result;
}

// Cross entropy of x W^T + b. The logits of a vocabulary are far larger than everything else in a
// training step, and page faults for them cost more than their arithmetic. So they are computed in
// scratch, a part at a time. linear_cross_entropy and linear_cross_entropy_backward, fp32: some
// rows and classes at a time; the backward recomputes the logits. linear_cross_entropy_gradients,
// bfloat16 and float16: some rows at a time; the logits are overwritten by their gradient, so that
// losses and gradients together take three products.

// 16 MB of logits.
constexpr int64_t kRows = 1024, kClasses = 4096;
// Shared scratch: 0 and 1 hold packed weights.
constexpr int kLogitsSlot = 2, kSumsSlot = 3;

struct Call {
  Rows x;
  Tensor weight, target;
  std::optional<Tensor> bias;
  int64_t rows, classes, k, ignored;
  double smoothing;

  Call(const char* op, const Tensor& input, const Tensor& w, const std::optional<Tensor>& b,
       const Tensor& t, int64_t ignore_index, double label_smoothing)
      : weight(w),
        bias(as_contiguous(b)),
        classes(w.dim() == 2 ? w.size(0) : 0),
        k(w.dim() == 2 ? w.size(1) : 0),
        ignored(ignore_index),
        smoothing(label_smoothing) {
    check_float(op, "input", input);
    STD_TORCH_CHECK(input.dim() == 2, op, ": input must be (rows, inputs)");
    check_weight(op, "weight", w, input.size(1), b);
    target = checked_target(op, t, input, classes, ignored);
    x = as_rows(input);
    rows = input.size(0);
  }

  const void* rows_from(int64_t row) const {
    return offset_ptr(x.data, Element::float32, row * x.stride);
  }

  // Calls f(args, first row, rows, weights of the classes) with the logits in args.
  template <class F>
  void each_part(const F& f) const {
    Tensor whole = weight;
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t m = std::min(kRows, rows - row);
      for (int64_t first = 0; first < classes; first += kClasses) {
        const int64_t n = std::min(kClasses, classes - first);
        const Tensor part = torch::stable::narrow(whole, 0, first, n);
        float* logits = shared_scratch(kLogitsSlot).floats(m * n);
        run_linear({Element::float32, rows_from(row), nullptr,
                    offset_ptr(data_of(bias), Element::float32, first), nullptr, logits, m, k, n,
                    x.stride, 0, n, 0},
                   part, std::nullopt, 0);
        CrossEntropyArgs args{};
        args.type = Element::float32;
        args.logits = logits;
        args.layout.row = args.columns = n;
        args.group_rows = m;
        args.target = static_cast<const int64_t*>(target.const_data_ptr()) + row;
        args.first = first;
        args.classes = classes;
        args.ignored = ignored;
        args.smoothing = static_cast<float>(smoothing);
        f(args, row, m, part);
      }
    }
    trim_shared_scratch();
  }
};

std::tuple<Tensor, Tensor> linear_cross_entropy(Tensor input, Tensor weight,
                                                std::optional<Tensor> bias, Tensor target,
                                                int64_t ignored, double smoothing) {
  const Call call("linear_cross_entropy", input, weight, bias, target, ignored, smoothing);
  const int64_t rows = call.rows;
  Tensor losses = empty_tensor(input, {rows}), statistics = empty_tensor(input, {rows, 2});
  if (call.classes == 0) {  // all rows are ignored
    for (Tensor* tensor : {&losses, &statistics}) torch::stable::zero_(*tensor);
    return {losses, statistics};
  }
  // The online softmax of each row while the classes are read in parts.
  const int64_t most = std::min(kRows, rows);
  std::vector<float> so_far(4 * most);
  call.each_part([&](CrossEntropyArgs& args, int64_t row, int64_t m, const Tensor&) {
    float* place = so_far.data();
    for (float** of : {&args.row_max, &args.sum, &args.shifted_sum, &args.target_logit})
      *of = std::exchange(place, place + most);
    args.losses = static_cast<float*>(losses.mutable_data_ptr()) + row;
    args.statistics = static_cast<float*>(statistics.mutable_data_ptr()) + 2 * row;
    run_cross_entropy(args, m);
  });
  return {losses, statistics};
}

// Gradients of input, weight and bias; empty where not wanted.
std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    Tensor grad, Tensor input, Tensor weight, std::optional<Tensor> bias, Tensor target,
    Tensor statistics, int64_t ignored, double smoothing, bool want_input, bool want_weight,
    bool want_bias) {
  const char* op = "linear_cross_entropy_backward";
  const Call call(op, input, weight, bias, target, ignored, smoothing);
  const int64_t rows = call.rows, n = call.classes, k = call.k;
  check_rows(op, grad, statistics, call.target);
  grad = as_contiguous(grad);
  statistics = as_contiguous(statistics);
  Tensor grad_input = want_input ? empty_tensor(input, {rows, k}) : empty_tensor(input, {0});
  Tensor grad_weight = want_weight ? empty_tensor(weight, {n, k}) : empty_tensor(weight, {0});
  Tensor grad_bias = empty_tensor(weight, {want_bias ? n : 0});
  if (rows == 0 || n == 0) {
    for (Tensor* tensor : {&grad_input, &grad_weight, &grad_bias}) torch::stable::zero_(*tensor);
    return {grad_input, grad_weight, grad_bias};
  }
  auto* dx = static_cast<float*>(grad_input.mutable_data_ptr());
  auto* dw = static_cast<float*>(grad_weight.mutable_data_ptr());
  auto* db = static_cast<float*>(grad_bias.mutable_data_ptr());
  call.each_part([&](CrossEntropyArgs& args, int64_t row, int64_t m, const Tensor& part) {
    float* logits = const_cast<float*>(static_cast<const float*>(args.logits));
    args.statistics = static_cast<float*>(statistics.mutable_data_ptr()) + 2 * row;
    run_cross_entropy_gradient(
        {args, static_cast<const float*>(grad.const_data_ptr()) + row, 1, logits, args.layout}, m);
    if (want_input && k > 0) {
      // Sums alternate between two buffers such that the last one is the result.
      const int64_t left = (n - args.first - 1) / kClasses;
      float* place[] = {dx + row * k, shared_scratch(kSumsSlot).floats(m * k)};
      run_linear(
          {args.type, logits, nullptr, nullptr, args.first > 0 ? place[(left + 1) % 2] : nullptr,
           place[left % 2], m, args.columns, k, args.columns, k, k, 0},
          column_panels_of(part, 1, m));
    }
    if (!want_weight && !want_bias) return;
    run_weight_gradient_part({.type = args.type,
                              .grad = logits,
                              .x = call.rows_from(row),
                              .grad_weight = want_weight ? dw + args.first * k : nullptr,
                              .grad_bias = want_bias ? db + args.first : nullptr,
                              .m = m,
                              .n = args.columns,
                              .k = k,
                              .grad_stride = args.columns,
                              .x_stride = call.x.stride,
                              .first = row == 0},
                             0);
  });
  return {grad_input, grad_weight, grad_bias};
}

// Returns the losses, and the gradients of sum over rows of grad (default 1) * loss: of input in
// its dtype, of weight and bias in fp32. Empty where not wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_gradients(
    std::optional<Tensor> grad, Tensor input, Tensor weight, std::optional<Tensor> bias,
    Tensor target, int64_t part_rows, int64_t ignored, double smoothing, bool want_input,
    bool want_weight, bool want_bias) {
  const char* op = "linear_cross_entropy_gradients";
  STD_TORCH_CHECK(input.is_cpu() && is_reduced_float(input) && input.dim() == 2, op,
                  ": input must be (rows, inputs), bfloat16 or float16, and on the CPU");
  check_weight(op, "weight", weight, input.size(1), bias, input.scalar_type());
  STD_TORCH_CHECK(part_rows > 0, op, ": part_rows must be positive");
  const int64_t rows = input.size(0), n = weight.size(0), k = weight.size(1);
  target = checked_target(op, target, input, n, ignored);
  if (grad) {
    check_float(op, "grad", *grad);
    STD_TORCH_CHECK(grad->dim() == 1 && grad->size(0) == rows, op, ": grad must be (", rows, ")");
    grad = as_contiguous(*grad);
  }
  bias = as_contiguous(bias);
  Tensor losses = empty_float_tensor(input, {rows});
  Tensor grad_input = want_input ? empty_tensor(input, {rows, k}) : empty_tensor(input, {0});
  Tensor grad_weight = want_weight ? empty_float_tensor(weight, {n, k}) : empty_tensor(weight, {0});
  Tensor grad_bias = want_bias ? empty_float_tensor(weight, {n}) : empty_tensor(weight, {0});
  if (rows == 0 || n == 0) {
    for (Tensor* tensor : {&losses, &grad_input, &grad_weight, &grad_bias})
      torch::stable::zero_(*tensor);
    return {losses, grad_input, grad_weight, grad_bias};
  }
  const Element type = element_of(input);
  const Rows x = as_rows(input);
  const Panels panels = panels_of(weight, std::nullopt, 0, rows);
  const bool through = want_input && k > 0, sums = want_weight || want_bias;
  const Panels columns = through ? column_panels_of(weight, 1, rows) : Panels{};
  // No part is marked as the last one, so the kernel does not round: the fp32 sums are the result.
  WeightGradientArgs gradient{};
  gradient.type = type;
  gradient.sums = floats_if(want_weight, grad_weight);
  gradient.bias_sums = floats_if(want_bias, grad_bias);
  gradient.grad_weight = gradient.sums;
  gradient.grad_bias = gradient.bias_sums;
  gradient.n = gradient.grad_stride = n;
  gradient.k = k;
  gradient.x_stride = x.stride;
  gradient.last = false;

  // Parts of about equal size.
  const int64_t parts = (rows + part_rows - 1) / part_rows;
  const int64_t max_rows = (rows + parts - 1) / parts;
  std::vector<float> ones(grad ? 0 : max_rows, 1.0f), statistics(2 * max_rows);
  void* logits = bytes_of(shared_scratch(kLogitsSlot), 2 * max_rows * n);
  for (int64_t row = 0; row < rows; row += max_rows) {
    const int64_t m = std::min(max_rows, rows - row);
    const void* x_rows = offset_ptr(x.data, type, row * x.stride);
    run_linear({type, x_rows, nullptr, data_of(bias), nullptr, logits, m, k, n, x.stride, 0, n, 0},
               panels);
    CrossEntropyArgs args{};
    args.type = type;
    args.logits = logits;
    args.layout.row = args.columns = args.classes = n;
    args.group_rows = m;
    args.target = static_cast<const int64_t*>(target.const_data_ptr()) + row;
    args.ignored = ignored;
    args.smoothing = static_cast<float>(smoothing);
    args.losses = static_cast<float*>(losses.mutable_data_ptr()) + row;
    args.statistics = statistics.data();
    run_cross_entropy(args, m);
    if (!through && !sums) continue;
    const float* scale =
        grad ? static_cast<const float*>(grad->const_data_ptr()) + row : ones.data();
    run_cross_entropy_gradient({args, scale, 1, logits, args.layout}, m);
    if (through)
      run_linear({type, logits, nullptr, nullptr, nullptr,
                  offset_ptr(grad_input.mutable_data_ptr(), type, row * k), m, n, k, n, k, k, 0},
                 columns);
    if (!sums) continue;
    gradient.grad = logits;
    gradient.m = m;
    gradient.first = row == 0;
    gradient.x = x_rows;
    run_weight_gradient_part(gradient, kSumsSlot);
  }
  trim_shared_scratch();
  return {losses, grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cross_entropy.cpu", TF_BOX(&tf::cross_entropy));
  m.impl("cross_entropy_backward.cpu", TF_BOX(&tf::cross_entropy_backward));
  m.impl("linear_cross_entropy.cpu", TF_BOX(&tf::linear_cross_entropy));
  m.impl("linear_cross_entropy_backward.cpu", TF_BOX(&tf::linear_cross_entropy_backward));
  m.impl("linear_cross_entropy_gradients.cpu", TF_BOX(&tf::linear_cross_entropy_gradients));
}
