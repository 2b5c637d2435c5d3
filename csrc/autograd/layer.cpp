// encoder_layer: the layers of torch.nn, composed of the steps of small calls.
#include "autograd/steps.h"

namespace tf::autograd {
namespace {

// The parameters of nn.bound.Group: of attention, then of the network, two maps and the norm.
enum { kJoinedMap, kOutputMap = 2, kNorm1 = 4, kFirst = 6, kSecond = 8, kNorm2 = 10, kCount = 12 };

double number(PyObject* list, Py_ssize_t place) {
  const double found = PyFloat_AsDouble(PyList_GET_ITEM(list, place));
  if (found == -1.0 && PyErr_Occurred()) raise_python_error();
  return found;
}

// Arguments: x, [weight or bias, ...], [eps, eps], heads, norm_first, batch_first, activation,
// mask, is_causal, [probabilities of dropout: attention, its output, hidden units, the network's
// output].
PyObject* enter_encoder_layer(Op& op, Arguments given, Py_ssize_t count) {
  if (count != 10 || !is_plain_state()) return dispatch();
  const Settings settings = current_settings();
  const Tensor *x = plain(given[0]), *mask = nullptr, *p[kCount];
  if (!settings.is_direct || !settings.falls_back || !x || x->dim() != 3 || !is_float(*x) ||
      !x->is_contiguous() || x->numel() == 0 || !PyList_Check(given[1]) ||
      PyList_GET_SIZE(given[1]) != kCount || !plain_or_none(given[7], mask))
    return dispatch();
  for (int i = 0; i < kCount; ++i) {
    if (!plain_or_none(PyList_GET_ITEM(given[1], i), p[i])) return dispatch();
    const bool is_weight = i % 2 == 0 && i != kNorm1 && i != kNorm2;
    if (p[i] ? !is_float(*p[i]) || !p[i]->is_contiguous() || p[i]->dim() != 1 + is_weight ||
                   p[i]->is_inference()
             : is_weight)
      return dispatch();
  }
  const int64_t width = x->size(2), hidden = p[kFirst]->size(0), rows = x->numel() / width;
  const JoinedHeads heads{PyLong_AsLongLong(given[3]), given[5] == Py_True};
  const bool norm_first = given[4] == Py_True, causal = given[8] == Py_True;
  const int64_t batch = x->size(heads.batch_first ? 0 : 1),
                length = x->size(heads.batch_first ? 1 : 0);
  const int activation = activation_code(given[6]);
  const auto is_map = [&](int place, int64_t outputs, int64_t inputs) {
    return p[place]->size(0) == outputs && p[place]->size(1) == inputs &&
           (!p[place + 1] || p[place + 1]->size(0) == outputs);
  };
  for (int i : {kNorm1, kNorm2})
    for (int each : {i, i + 1})
      if (p[each] && p[each]->size(0) != width) return dispatch();
  if (activation < 0 || heads.count <= 0 || width % heads.count != 0 ||
      !is_map(kJoinedMap, 3 * width, width) || !is_map(kOutputMap, width, width) ||
      !is_map(kFirst, hidden, width) || !is_map(kSecond, width, hidden) || hidden == 0 ||
      x->is_inference())
    return dispatch();
  if (mask && (causal || mask->scalar_type() != at::kBool ||
               !mask_fits(*mask, {batch, heads.count, length, length}, at::kFloat)))
    return dispatch();
  static Op &linear = *find_op("linear"), &network = *find_op("feed_forward"),
            &attention = *find_op("attention"), &norm = *find_op("layer_norm"),
            &add_norm = *find_op("add_layer_norm");
  for (const Op* each : {&linear, &network, &attention, &norm, &add_norm})
    if (!each->direct) return dispatch();
  if (rows * width * 3 * width >= linear.own || 2 * rows * width * hidden >= network.own ||
      rows * width * length >= attention.own || rows * width >= std::min(norm.own, add_norm.own))
    return dispatch();
  Drop drops[3];
  double probabilities[4];
  for (int i = 0; i < 4; ++i) {
    probabilities[i] = number(given[9], i);
    if (!(probabilities[i] >= 0.0 && probabilities[i] < 1.0)) return dispatch();
  }
  const float eps[] = {static_cast<float>(number(given[2], 0)),
                       static_cast<float>(number(given[2], 1))};
  const auto normalized = [&](int place, const Tensor& input, const Tensor* residual, int which,
                              const Drop& drop) {
    const Norm tensors{&input, residual, p[place], p[place + 1]};
    return normalize(residual ? add_norm : norm, tensors, NormKind::layer, eps[which], drop,
                     needs_grad({&input, residual, p[place], p[place + 1]}));
  };
  const auto mapped = [&](int place, const Tensor& input) {
    return multiply(linear, input, *p[place], p[place + 1], kIdentity,
                    needs_grad({&input, p[place], p[place + 1]}));
  };
  RECORD_FUNCTION(op.name, c10::ArrayRef<const c10::IValue>{});
  const Tensor inside = norm_first ? normalized(kNorm1, *x, nullptr, 0, {}).output : *x;
  const Tensor joined = mapped(kJoinedMap, inside);
  // Seeds are drawn in the order of nn.fusion.compose_bound.
  drops[0] = Drop::draw(probabilities[0]);
  const Tensor attended =
      attend_joined(op, joined, heads, mask, causal, drops[0], needs_grad({&joined}));
  const Tensor projected = mapped(kOutputMap, attended);
  drops[1] = Drop::draw(probabilities[1]);
  const Normalized middle =
      normalized(norm_first ? kNorm2 : kNorm1, projected, x, norm_first ? 1 : 0, drops[1]);
  drops[2] = Drop::draw(probabilities[2]);
  const Tensor output = run_network(
      network, middle.output, *p[kFirst], p[kFirst + 1], *p[kSecond], p[kSecond + 1], activation,
      drops[2], needs_grad({&middle.output, p[kFirst], p[kFirst + 1], p[kSecond], p[kSecond + 1]}));
  if (norm_first)
    return wrap(middle.sum +
                (probabilities[3] > 0.0 ? at::dropout(output, probabilities[3], true) : output));
  return wrap(normalized(kNorm2, output, &middle.output, 1, Drop::draw(probabilities[3])).output);
}

}  // namespace

TF_ENTRY(encoder_layer, enter_encoder_layer)

}  // namespace tf::autograd
