// linear and feed_forward.
#include "autograd/ops.h"

namespace tf::autograd {

bool fits(int64_t columns, const Tensor& weight, const Tensor* bias) {
  return weight.dim() == 2 && weight.size(1) == columns &&
         (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)));
}

namespace {

void* room(Tensor& result, bool wanted, at::IntArrayRef sizes) {
  if (!wanted) return nullptr;
  result = empty(sizes);
  return result.mutable_data_ptr();
}

// Inputs: input, weight, bias.
struct LinearBackward : Function<3, 2> {
  enum { kInput, kWeight };

  std::array<double, 0> numbers() const { return {}; }
  variable_list run(const Given& given) const {
    const Tensor &x = given.tensors[kInput], &weight = given.tensors[kWeight];
    if (!is_plain(given)) return by_formula(given, {given.grads[0], x, weight}, numbers());
    variable_list found(inputs);
    const Tensor dy = given.grads[0].contiguous();
    const int64_t n = dy.sizes().back(), m = dy.numel() / n;
    const int64_t k = x.defined() ? x.sizes().back() : weight.defined() ? weight.size(1) : 0;
    LinearBackwardArgs args{.type = Element::float32,
                            .grad = data(dy),
                            .x = data(x),
                            .weight = data(weight),
                            .preactivation = nullptr,
                            .grad_input = nullptr,
                            .grad_weight = nullptr,
                            .grad_bias = nullptr,
                            .m = m,
                            .n = n,
                            .k = k,
                            .grad_stride = n,
                            .x_stride = k,
                            .weight_stride = k,
                            .activation = kIdentity};
    args.grad_input = room(found[0], given.wants[0], with_columns(dy, k));
    args.grad_weight = room(found[1], given.wants[1], {n, k});
    args.grad_bias = room(found[2], given.wants[2], {n});
    kernels->linear_backward(args);
    return found;
  }
};

}  // namespace

Tensor multiply(const Op& op, const Tensor& x, const Tensor& weight, const Tensor* bias,
                int activation, bool grad) {
  RECORD_FUNCTION(op.name, c10::ArrayRef<const c10::IValue>{});
  const int64_t n = weight.size(0), k = weight.size(1), m = x.numel() / k;
  Tensor y = empty(with_columns(x, n));
  {
    const WithoutGil released(m * n * k);
    kernels->linear({.type = Element::float32,
                     .x = data(x),
                     .packed = nullptr,
                     .bias = data(bias),
                     .residual = nullptr,
                     .y = y.mutable_data_ptr(),
                     .m = m,
                     .k = k,
                     .n = n,
                     .x_stride = k,
                     .residual_stride = 0,
                     .y_stride = n,
                     .activation = grad ? kIdentity : activation,
                     .weight = data(weight),
                     .weight_stride = k});
  }
  if (!grad) return y;
  auto node = make_node<LinearBackward>(op, x, weight, maybe(bias));
  node->save(LinearBackward::kInput, &x, weight.requires_grad());
  node->save(LinearBackward::kWeight, &weight, x.requires_grad());
  torch::autograd::set_history(y, node);
  return activate(y, activation);
}

namespace {

// Arguments: input, weight, bias, activation.
PyObject* enter_linear(Op& op, Arguments given, Py_ssize_t count) {
  if (!op.direct || count != 4 || !is_plain_state()) return dispatch();
  const Settings settings = current_settings();
  const Tensor *x = plain(given[0]), *weight = plain(given[1]), *bias = nullptr;
  const int activation = given[3] == Py_None ? kIdentity : activation_code(given[3]);
  if (!settings.is_direct || !x || !weight || !plain_or_none(given[2], bias) || activation < 0 ||
      x->dim() == 0 || !element_of(*x) || !have_one_dtype({x, weight, bias}) ||
      !fits(x->sizes().back(), *weight, bias))
    return dispatch();
  const auto tensors = {x, weight, bias};
  const bool grad = needs_grad(tensors);
  if (settings.falls_back && is_float(*x)) {
    const int64_t size = x->numel() * weight->size(0);
    if (size > 0 && size < op.own[grad] && are_contiguous(tensors) &&
        (!grad || (are_savable(tensors) && weight->numel() < kMostWeights)))
      return wrap(multiply(op, *x, *weight, bias, activation, grad));
    if (op.prefers_torch(size, weight->numel(), grad)) return dispatch();
  }
  if (grad && op.limits(*x)) return dispatch();
  return run_direct(op, {given[0], given[1], given[2], given[3]});
}

// Inputs: input, weight1, bias1, weight2, bias2.
struct FeedForwardBackward : Function<5, 6> {
  enum { kInput, kWeight1, kBias1, kWeight2, kPreactivation, kSeed };
  int activation;
  double p;

  std::array<double, 2> numbers() const { return {static_cast<double>(activation), p}; }
  variable_list run(const Given& given) const {
    const auto& [x, weight1, bias1, weight2, z, seed] = given.tensors;
    if (!is_plain(given))
      return by_formula(given, {given.grads[0], x, weight1, bias1, weight2, seed}, numbers());
    variable_list found(inputs);
    const Tensor dy = given.grads[0].contiguous();
    const int64_t f = weight1.size(0), k = weight1.size(1), n = weight2.size(0);
    FeedForwardBackwardArgs args{.type = Element::float32,
                                 .grad = data(dy),
                                 .x = data(x),
                                 .weight1 = data(weight1),
                                 .weight2 = data(weight2),
                                 .z = data(z),
                                 .m = dy.numel() / n,
                                 .k = k,
                                 .f = f,
                                 .n = n,
                                 .grad_stride = n,
                                 .x_stride = k,
                                 .weight1_stride = k,
                                 .weight2_stride = f,
                                 .activation = activation,
                                 .dropout = Drop{p, seed}.kernel(),
                                 .results = {}};
    const at::IntArrayRef sizes[] = {x.sizes(), weight1.sizes(), f, weight2.sizes(), n};
    for (int i = 0; i < 5; ++i) args.results[i] = room(found[i], given.wants[i], sizes[i]);
    kernels->feed_forward_backward(args);
    return found;
  }
};

}  // namespace

Tensor run_network(const Op& op, const Tensor& x, const Tensor& weight1, const Tensor* bias1,
                   const Tensor& weight2, const Tensor* bias2, int activation, const Drop& drop,
                   bool grad) {
  RECORD_FUNCTION(op.name, c10::ArrayRef<const c10::IValue>{});
  const int64_t f = weight1.size(0), k = weight1.size(1), n = weight2.size(0), m = x.numel() / k;
  Tensor y = empty(with_columns(x, n)), z = grad ? empty({m, f}) : Tensor();
  {
    const WithoutGil released(m * f * (k + n));
    kernels->feed_forward({.type = Element::float32,
                           .x = data(x),
                           .bias1 = data(bias1),
                           .bias2 = data(bias2),
                           .y = y.mutable_data_ptr(),
                           .m = m,
                           .k = k,
                           .f = f,
                           .n = n,
                           .x_stride = k,
                           .activation = activation,
                           .dropout = drop.kernel(),
                           .preactivation = grad ? z.mutable_data_ptr() : nullptr},
                          data(weight1), data(weight2));
  }
  if (!grad) return y;
  auto node = make_node<FeedForwardBackward>(op, x, weight1, maybe(bias1), weight2, maybe(bias2));
  node->activation = activation;
  node->p = drop.p;
  node->save(FeedForwardBackward::kInput, &x);
  node->save(FeedForwardBackward::kWeight1, &weight1);
  node->save(FeedForwardBackward::kBias1, bias1);
  node->save(FeedForwardBackward::kWeight2, &weight2);
  node->save(FeedForwardBackward::kPreactivation, z);
  node->save(FeedForwardBackward::kSeed, drop.seed);
  torch::autograd::set_history(y, node);
  return y;
}

namespace {

// Arguments: input, weight1, bias1, weight2, bias2, activation, dropout_p.
PyObject* enter_feed_forward(Op& op, Arguments given, Py_ssize_t count) {
  if (!op.direct || count != 7 || !is_plain_state()) return dispatch();
  const Settings settings = current_settings();
  const Tensor *x = plain(given[0]), *weight1 = plain(given[1]), *bias1 = nullptr,
               *weight2 = plain(given[3]), *bias2 = nullptr;
  const int activation = activation_code(given[5]);
  if (!settings.is_direct || !x || !weight1 || !weight2 || !plain_or_none(given[2], bias1) ||
      !plain_or_none(given[4], bias2) || activation < 0 || x->dim() == 0 || !element_of(*x) ||
      !have_one_dtype({x, weight1, bias1, weight2, bias2}) ||
      !fits(x->sizes().back(), *weight1, bias1) || !fits(weight1->size(0), *weight2, bias2) ||
      !PyFloat_CheckExact(given[6]))
    return dispatch();
  const double p = PyFloat_AS_DOUBLE(given[6]);
  if (!(p >= 0.0 && p < 1.0)) return dispatch();
  const auto tensors = {x, weight1, bias1, weight2, bias2};
  const bool grad = needs_grad(tensors);
  if (settings.falls_back && is_float(*x)) {
    const int64_t weights = weight1->numel() + weight2->numel();
    const int64_t size = x->numel() / std::max<int64_t>(1, x->sizes().back()) * weights;
    if (x->numel() > 0 && weight1->numel() > 0 && weight2->numel() > 0 && size < op.own[grad] &&
        are_contiguous(tensors) &&
        (!grad ||
         (are_savable(tensors) && std::max(weight1->numel(), weight2->numel()) < kMostWeights)))
      return wrap(
          run_network(op, *x, *weight1, bias1, *weight2, bias2, activation, Drop::draw(p), grad));
    if (p == 0.0 && op.prefers_torch(size, weights, grad)) return dispatch();
  }
  if (grad && op.limits(*x)) return dispatch();
  const Reference seed(wrap(Drop::draw(p).seed));
  return run_direct(
      op, {given[0], given[1], given[2], given[3], given[4], given[5], given[6], seed.object});
}

}  // namespace

TF_ENTRY(linear, enter_linear)
TF_ENTRY(feed_forward, enter_feed_forward)

}  // namespace tf::autograd
