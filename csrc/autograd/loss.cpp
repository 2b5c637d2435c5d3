// cross_entropy: small calls, on PyTorch's op.
#include "autograd/ops.h"

namespace tf::autograd {
namespace {

int reduction_code(PyObject* name) {
  const auto is = [&](const char* other) {
    return PyUnicode_CheckExact(name) && PyUnicode_CompareWithASCIIString(name, other) == 0;
  };
  return is("mean")   ? at::Reduction::Mean
         : is("sum")  ? at::Reduction::Sum
         : is("none") ? at::Reduction::None
                      : -1;
}

// Arguments: input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing.
PyObject* enter_cross_entropy(Op& op, Arguments given, Py_ssize_t count) {
  if (count != 8 || !is_plain_state() || given[2] != Py_None || given[3] != Py_None ||
      !PyLong_CheckExact(given[4]) || given[5] != Py_None || !PyFloat_CheckExact(given[7]))
    return dispatch();
  const Settings settings = current_settings();
  const Tensor *input = plain(given[0]), *target = plain(given[1]);
  const int reduction = reduction_code(given[6]);
  const double smoothing = PyFloat_AS_DOUBLE(given[7]);
  int overflow = 0;
  const int64_t ignored = PyLong_AsLongLongAndOverflow(given[4], &overflow);
  if (!settings.is_direct || !settings.falls_back || !input || !target || reduction < 0 ||
      overflow || !(smoothing >= 0.0 && smoothing <= 1.0) || !element_of(*input) ||
      input->dim() != 2 || target->dim() != 1 || input->size(0) != target->size(0) ||
      target->scalar_type() != at::kLong || !target->is_contiguous())
    return dispatch();
  const bool grad = needs_grad({input});
  // As fast_path.logits_size counts elements.
  const int64_t elements = input->numel() + (is_float(*input) ? 0 : input->numel() / 4);
  if ((input->size(1) < 16 ? 32 : 1) * elements >= op.torch[grad]) return dispatch();
  // PyTorch multiplies the gradients of ignored rows by zero, which leaves NaN for infinite logits.
  const auto* targets = target->const_data_ptr<int64_t>();
  if (grad && std::find(targets, targets + target->numel(), ignored) != targets + target->numel() &&
      !std::isfinite(input->detach().sum().item<float>()))
    return dispatch();
  // The sums are in float32.
  return wrap(
      at::cross_entropy_loss(input->to(at::kFloat), *target, {}, reduction, ignored, smoothing)
          .to(input->scalar_type()));
}

}  // namespace

TF_ENTRY(cross_entropy, enter_cross_entropy)

}  // namespace tf::autograd
