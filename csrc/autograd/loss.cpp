// cross_entropy and linear_cross_entropy: small calls, which run PyTorch's loss.
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

struct Loss {
  const Tensor* target;
  int reduction;
  int64_t ignored;
  double smoothing;
};

// Returns false if the call must be dispatched, as with a wrong argument.
bool read_loss(Loss& loss, PyObject* target, PyObject* reduction, PyObject* ignored,
               PyObject* smoothing) {
  if (!PyLong_CheckExact(ignored) || !PyFloat_CheckExact(smoothing)) return false;
  int overflow = 0;
  loss = {plain(target), reduction_code(reduction),
          PyLong_AsLongLongAndOverflow(ignored, &overflow), PyFloat_AS_DOUBLE(smoothing)};
  return loss.target && loss.reduction >= 0 && !overflow && loss.smoothing >= 0.0 &&
         loss.smoothing <= 1.0 && loss.target->dim() == 1 &&
         loss.target->scalar_type() == at::kLong && loss.target->is_contiguous();
}

// PyTorch's loss of logits (N, C). It multiplies the gradients of ignored rows by zero, which gives
// NaN for infinite logits: such calls are dispatched.
PyObject* run_loss(const Tensor& logits, const Loss& loss, bool grad) {
  const auto* begin = loss.target->const_data_ptr<int64_t>();
  const auto* end = begin + loss.target->numel();
  if (grad && std::find(begin, end, loss.ignored) != end &&
      !std::isfinite(logits.detach().sum().item<float>()))
    return dispatch();
  // The sums are in float32.
  return wrap(at::cross_entropy_loss(logits.to(at::kFloat), *loss.target, {}, loss.reduction,
                                     loss.ignored, loss.smoothing)
                  .to(logits.scalar_type()));
}

// Arguments: input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing.
PyObject* enter_cross_entropy(Op& op, Arguments given, Py_ssize_t count) {
  if (count != 8 || !is_plain_state() || given[2] != Py_None || given[3] != Py_None ||
      given[5] != Py_None)
    return dispatch();
  const Settings settings = current_settings();
  const Tensor* input = plain(given[0]);
  Loss loss;
  if (!settings.is_direct || !settings.falls_back || !input ||
      !read_loss(loss, given[1], given[6], given[4], given[7]) || !element_of(*input) ||
      input->dim() != 2 || input->size(0) != loss.target->size(0))
    return dispatch();
  const bool grad = needs_grad({input});
  // As fast_path.logits_size counts elements.
  const int64_t elements = input->numel() + (is_float(*input) ? 0 : input->numel() / 4);
  if ((input->size(1) < 16 ? 32 : 1) * elements >= op.torch[grad]) return dispatch();
  return run_loss(*input, loss, grad);
}

// Arguments: input, weight, target, bias, reduction, ignore_index, label_smoothing.
PyObject* enter_linear_cross_entropy(Op& op, Arguments given, Py_ssize_t count) {
  static Op& linear = *find_op("linear");
  if (!linear.direct || count != 7 || !is_plain_state()) return dispatch();
  const Settings settings = current_settings();
  const Tensor *x = plain(given[0]), *weight = plain(given[1]), *bias = nullptr;
  Loss loss;
  if (!settings.is_direct || !settings.falls_back || !x || !weight ||
      !plain_or_none(given[3], bias) || !read_loss(loss, given[2], given[4], given[5], given[6]) ||
      !is_float(*x) || x->dim() != 2 || !have_one_dtype({x, weight, bias}) ||
      !fits(x->size(1), *weight, bias) || x->size(0) != loss.target->size(0) ||
      !are_contiguous({x, weight, bias}))
    return dispatch();
  const bool grad = needs_grad({x, weight, bias});
  const int64_t logits = x->size(0) * weight->size(0), size = logits * x->size(1);
  if (size == 0 || logits >= op.torch[grad] || size >= linear.own[grad] ||
      (grad && (!are_savable({x, weight, bias}) || weight->numel() >= kMostWeights)))
    return dispatch();
  return run_loss(multiply(linear, *x, *weight, bias, kIdentity, grad), loss, grad);
}

}  // namespace

TF_ENTRY(cross_entropy, enter_cross_entropy)
TF_ENTRY(linear_cross_entropy, enter_linear_cross_entropy)

}  // namespace tf::autograd
