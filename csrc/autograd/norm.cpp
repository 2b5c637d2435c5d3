// layer_norm and rms_norm, alone and behind a residual connection.
#include <limits>

#include "autograd/ops.h"

namespace tf::autograd {
namespace {

// Inputs: input, residual, weight, bias.
struct NormBackward : Function<4, 4> {
  NormKind kind;
  float eps;
  double p;  // dropout probability of the input, before the sum
  at::ScalarType weight_type;
  enum { kSource, kWeight, kStatistics, kSeed };  // statistics: (2, rows), means, 1 / deviations

  std::array<double, 3> numbers() const { return {static_cast<double>(kind), eps, p}; }
  variable_list run(const Given& given) const {
    auto [source, weight, statistics, seed] = given.tensors;
    Tensor dy = given.grads[0], dsum = given.grads.size() > 1 ? given.grads[1] : Tensor();
    if (!is_plain(given)) return by_formula(given, {dy, dsum, source, weight, seed}, numbers());
    const auto& wants = given.wants;
    variable_list found(inputs);
    if (!dy.defined()) dy = at::zeros_like(dsum);
    dy = dy.contiguous();
    if (dsum.defined()) dsum = dsum.contiguous();
    if (!source.defined()) source = dy;  // only the bias gradient is wanted, which does not need it
    const int64_t n = dy.size(-1), rows = dy.numel() / n;
    const auto type = dy.scalar_type();
    const bool drops = p > 0.0, want_source = wants[1] || (wants[0] && !drops);
    Tensor dsource = want_source ? empty(dy.sizes(), type) : Tensor();
    Tensor dinput = drops && wants[0] ? empty(dy.sizes(), type) : Tensor();
    if (wants[2]) found[2] = empty({n}, weight_type);
    if (wants[3]) found[3] = empty({n}, weight_type);
    const auto* means = statistics.const_data_ptr<float>();
    kernels->layer_norm_backward(
        {.type = *element_of(dy),
         .weight_type = weight_type == at::kFloat ? Element::float32 : *element_of(dy),
         .grad = data(dy),
         .grad_sum = data(dsum),
         .source = data(source),
         .weight = data(weight),
         .mean = means,
         .rstd = means + rows,
         .grad_source = want_source ? dsource.mutable_data_ptr() : nullptr,
         .grad_input = dinput.defined() ? dinput.mutable_data_ptr() : nullptr,
         .partial = nullptr,
         .rows = rows,
         .blocks = 0,
         .n = n,
         .grad_stride = n,
         .grad_sum_stride = n,
         .source_stride = n,
         .dropout_columns = n,
         .dropout = Drop{p, seed}.kernel(),
         .kind = kind},
        wants[2] ? found[2].mutable_data_ptr() : nullptr,
        wants[3] ? found[3].mutable_data_ptr() : nullptr);
    if (wants[0]) found[0] = drops ? dinput : dsource;
    if (wants[1]) found[1] = dsource;
    return found;
  }
};

// True if only the last dimension is normalised, and all shapes and dtypes fit.
bool fits(const Norm& norm, PyObject* shape) {
  const Tensor& x = *norm.input;
  if (PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) == 1)
    shape = PyTuple_GET_ITEM(shape, 0);
  else if (PyList_Check(shape) && PyList_GET_SIZE(shape) == 1)
    shape = PyList_GET_ITEM(shape, 0);
  if (!element_of(x) || x.dim() == 0 || !PyLong_CheckExact(shape)) return false;
  const int64_t n = x.sizes().back();
  int overflow = 0;
  if (PyLong_AsLongLongAndOverflow(shape, &overflow) != n || overflow) return false;
  for (const Tensor* each : {norm.weight, norm.bias})
    if (each && (each->dim() != 1 || each->size(0) != n ||
                 !(each->scalar_type() == x.scalar_type() || (norm.weight && is_float(*each)))))
      return false;
  return have_one_dtype({&x, norm.residual}) &&
         (!norm.residual || norm.residual->sizes() == x.sizes()) &&
         (!norm.weight || have_one_dtype({norm.weight, norm.bias}));
}

}  // namespace

Normalized normalize(const Op& op, const Norm& norm, NormKind kind, float eps, const Drop& drop,
                     bool grad) {
  RECORD_FUNCTION(op.name, c10::ArrayRef<const c10::IValue>{});
  const Tensor& x = *norm.input;
  const auto type = x.scalar_type();
  const int64_t n = x.sizes().back(), rows = x.numel() / n;
  Normalized result{empty(x.sizes(), type), norm.residual ? empty(x.sizes(), type) : Tensor()};
  const Tensor statistics = grad ? empty({2, rows}) : Tensor();
  float* means = grad ? statistics.mutable_data_ptr<float>() : nullptr;
  const Tensor* parameter = norm.weight ? norm.weight : norm.bias;
  const auto weight_type = parameter ? parameter->scalar_type() : type;
  {
    const WithoutGil released(x.numel());
    kernels->layer_norm(
        {.type = *element_of(x),
         .weight_type = weight_type == at::kFloat ? Element::float32 : *element_of(x),
         .x = data(x),
         .residual = data(norm.residual),
         .weight = data(norm.weight),
         .bias = data(norm.bias),
         .y = result.output.mutable_data_ptr(),
         .sum = norm.residual ? result.sum.mutable_data_ptr() : nullptr,
         .mean = means,
         .rstd = grad ? means + rows : nullptr,
         .n = n,
         .x_stride = n,
         .residual_stride = n,
         .eps = eps,
         .dropout_columns = n,
         .dropout = drop.kernel(),
         .kind = kind},
        rows);
  }
  if (!grad) return result;
  auto node =
      make_node<NormBackward>(op, x, maybe(norm.residual), maybe(norm.weight), maybe(norm.bias));
  node->kind = kind;
  node->eps = eps;
  node->p = drop.p;
  node->weight_type = weight_type;
  torch::autograd::set_history(result.output, node);
  if (norm.residual) torch::autograd::set_history(result.sum, node);
  const bool to_source = needs_grad({&x, norm.residual});
  if (norm.residual)
    node->save(NormBackward::kSource, result.sum, true);
  else
    node->save(NormBackward::kSource, &x, to_source || needs_grad({norm.weight}));
  node->save(NormBackward::kWeight, norm.weight, to_source);
  node->save(NormBackward::kStatistics, statistics);
  node->save(NormBackward::kSeed, drop.seed);
  return result;
}

namespace {

// Arguments: input, [residual], normalized_shape, weight, [bias], eps, [dropout_p].
template <bool adds, NormKind kind>
PyObject* enter(Op& op, Arguments given, Py_ssize_t count) {
  constexpr int at = adds ? 2 : 1;  // of normalized_shape
  constexpr bool has_bias = kind == NormKind::layer;
  constexpr int eps_at = at + 2 + has_bias;
  if (!op.direct || count != eps_at + 1 + adds || !is_plain_state() ||
      !current_settings().is_direct)
    return dispatch();
  Norm norm{plain(given[0])};
  if (adds) norm.residual = plain(given[1]);
  if (!norm.input || (adds && !norm.residual) || !plain_or_none(given[at + 1], norm.weight) ||
      (has_bias && !plain_or_none(given[at + 2], norm.bias)) || !fits(norm, given[at]))
    return dispatch();
  double eps = std::numeric_limits<float>::epsilon(), p = 0.0;
  if (PyFloat_CheckExact(given[eps_at]))
    eps = PyFloat_AS_DOUBLE(given[eps_at]);
  else if (has_bias || given[eps_at] != Py_None)
    return dispatch();
  if (adds) {
    if (!PyFloat_CheckExact(given[eps_at + 1])) return dispatch();
    p = PyFloat_AS_DOUBLE(given[eps_at + 1]);
    if (!(p >= 0.0 && p < 1.0)) return dispatch();
  }
  const auto tensors = {norm.input, norm.residual, norm.weight, norm.bias};
  const bool grad = needs_grad(tensors);
  const int64_t size = norm.input->numel();
  if (size > 0 && size < op.own[grad] && are_contiguous(tensors) &&
      (!grad || are_savable(tensors))) {
    Normalized result = normalize(op, norm, kind, static_cast<float>(eps), Drop::draw(p), grad);
    if (!adds) return wrap(std::move(result.output));
    return wrap(std::move(result.output), std::move(result.sum));
  }
  if (!PyTuple_Check(given[at]) || (grad && op.limits(*norm.input))) return dispatch();
  const Reference number(PyFloat_FromDouble(eps)), seed(wrap(Drop::draw(p).seed));
  if (!number.object) return nullptr;
  c10::SmallVector<PyObject*, 8> all(given, given + eps_at);
  all.push_back(number.object);
  if (adds) all.append({given[eps_at + 1], seed.object});
  return run_direct(op, all);
}

}  // namespace

TF_ENTRY(layer_norm, (enter<false, NormKind::layer>))
TF_ENTRY(rms_norm, (enter<false, NormKind::rms>))
TF_ENTRY(add_layer_norm, (enter<true, NormKind::layer>))
TF_ENTRY(add_rms_norm, (enter<true, NormKind::rms>))

}  // namespace tf::autograd
