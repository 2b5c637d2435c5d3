// encoder_layer: small encoder and decoder layers, and stacks of them, composed of the steps of
// small calls.
#include "autograd/ops.h"

namespace tf::autograd {
namespace {

// Kinds of recipe.py.
enum Kind { kSelfAttention, kCrossAttention, kFeedForward, kQueriesAndKeys };

// Two linear maps and a norm, as in nn.bound.Group.
struct Pair {
  Kind kind;
  const Tensor *weight1, *bias1, *weight2, *bias2, *norm_weight, *norm_bias;
  float eps;
};

int64_t integer(PyObject* object) {
  const int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) raise_python_error();
  return found;
}
double number(PyObject* object) {
  const double found = PyFloat_AsDouble(object);
  if (found == -1.0 && PyErr_Occurred()) raise_python_error();
  return found;
}

struct Layers {
  c10::SmallVector<Pair, 8> pairs;
  int64_t heads;
  bool norm_first, batch_first, grad = false;
  int activation;
  const Tensor *x, *mask = nullptr, *memory = nullptr, *memory_mask = nullptr;
  bool causal, memory_causal;
  c10::SmallVector<double, 8> dropouts;  // two of each sub-layer, or none
  const Op* op;
};

// Reads parameters and eps of all pairs; false if the steps do not support one of them.
bool read_pairs(Layers& layers, PyObject* kinds, PyObject* parameters, PyObject* eps) {
  const Py_ssize_t count = PyList_GET_SIZE(eps), kind_count = PyList_GET_SIZE(kinds);
  if (PyList_GET_SIZE(parameters) != 6 * count || kind_count == 0) return false;
  const bool may_need_grad = at::GradMode::is_enabled();
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int64_t kind = integer(PyList_GET_ITEM(kinds, i % kind_count));
    if (kind > kQueriesAndKeys) return false;
    Pair& pair = layers.pairs.emplace_back();
    pair.kind = static_cast<Kind>(kind);
    pair.eps = static_cast<float>(number(PyList_GET_ITEM(eps, i)));
    const Tensor** places[] = {&pair.weight1, &pair.bias1,       &pair.weight2,
                               &pair.bias2,   &pair.norm_weight, &pair.norm_bias};
    for (int place = 0; place < 6; ++place) {
      const Tensor*& tensor = *places[place];
      if (!plain_or_none(PyList_GET_ITEM(parameters, 6 * i + place), tensor)) return false;
      const bool is_weight = place == 0 || place == 2;
      if (!tensor) {
        if (is_weight) return false;
        continue;
      }
      if (!is_float(*tensor) || !tensor->is_contiguous() || tensor->dim() != 1 + is_weight ||
          (may_need_grad && tensor->numel() >= kMostWeights))
        return false;
      layers.grad |= may_need_grad && tensor->requires_grad();
    }
  }
  return true;
}

bool is_map(const Tensor* weight, const Tensor* bias, int64_t outputs, int64_t inputs) {
  return weight->size(0) == outputs && weight->size(1) == inputs &&
         (!bias || bias->size(0) == outputs);
}

// True if all shapes fit, all steps have kernels, and each product is smaller than the limit.
bool are_small(const Layers& layers) {
  for (const char* each : {"linear", "feed_forward", "attention", "layer_norm", "add_layer_norm"})
    if (!find_op(each)->direct) return false;
  const int64_t limit = layers.op->torch[layers.grad];
  const Tensor& x = *layers.x;
  const int64_t width = x.size(2), rows = x.numel() / width;
  const int64_t length = x.size(layers.batch_first ? 1 : 0);
  const int64_t keys = layers.memory ? layers.memory->numel() / width : rows;
  if (std::max(rows, keys) * width * 3 * width >= limit ||
      rows * width * std::max(length, keys) >= limit)
    return false;
  bool is_split = false;  // the previous pair has the maps of queries and keys
  for (const Pair& pair : layers.pairs) {
    for (const Tensor* each : {pair.norm_weight, pair.norm_bias})
      if (each && each->size(0) != width) return false;
    const int64_t first = pair.weight1->size(0);
    if (pair.kind == kFeedForward) {
      if (first == 0 || rows * width * first >= limit ||
          !is_map(pair.weight1, pair.bias1, first, width) ||
          !is_map(pair.weight2, pair.bias2, width, first))
        return false;
    } else {
      const bool is_joined = pair.kind != kQueriesAndKeys && !is_split;
      if (!is_map(pair.weight1, pair.bias1, is_joined ? 3 * width : width, width) ||
          !is_map(pair.weight2, pair.bias2, width, width))
        return false;
      if (pair.kind == kCrossAttention && !layers.memory) return false;
    }
    is_split = pair.kind == kQueriesAndKeys;
  }
  return true;
}

Tensor map(const Tensor& input, const Tensor& weight, const Tensor* bias) {
  static Op& linear = *find_op("linear");
  return multiply(linear, input, weight, bias, kIdentity, needs_grad({&input, &weight, bias}));
}

// Returns the joined heads of one attention.
Tensor attend(const Layers& layers, const Pair& pair, const Pair* queries_and_keys,
              const Tensor& inside, const Drop& drop) {
  const bool is_cross = pair.kind == kCrossAttention;
  const Tensor& source = is_cross ? *layers.memory : inside;
  HeadParts parts{layers.heads, layers.batch_first, {}};
  auto& [first, second, third] = parts.tensors;
  if (queries_and_keys) {
    first = map(inside, *queries_and_keys->weight1, queries_and_keys->bias1);
    second = map(source, *queries_and_keys->weight2, queries_and_keys->bias2);
    third = map(source, *pair.weight1, pair.bias1);
  } else if (is_cross) {
    // One node, whose backward is one copy; a slice would cost zeros, a copy and a sum.
    const int64_t width = inside.size(2), sizes[] = {width, 2 * width};
    const auto weights = pair.weight1->split_with_sizes(sizes);
    const auto biases = pair.bias1 ? pair.bias1->split_with_sizes(sizes) : std::vector<Tensor>();
    first = map(inside, weights[0], pair.bias1 ? &biases[0] : nullptr);
    second = map(source, weights[1], pair.bias1 ? &biases[1] : nullptr);
  } else {
    first = map(inside, *pair.weight1, pair.bias1);
  }
  return attend_parts(
      *layers.op, parts, is_cross ? layers.memory_mask : layers.mask,
      is_cross ? layers.memory_causal : layers.causal, drop,
      at::GradMode::is_enabled() && std::any_of(parts.tensors.begin(), parts.tensors.end(),
                                                [](const Tensor& x) { return x.requires_grad(); }));
}

Tensor run_layers(const Layers& layers) {
  static Op &network = *find_op("feed_forward"), &norm = *find_op("layer_norm"),
            &add_norm = *find_op("add_layer_norm");
  RECORD_FUNCTION(layers.op->name, c10::ArrayRef<const c10::IValue>{});
  const auto normalized = [](const Pair& pair, const Tensor& input, const Tensor* residual,
                             const Drop& drop) {
    return normalize(residual ? add_norm : norm,
                     {&input, residual, pair.norm_weight, pair.norm_bias}, NormKind::layer,
                     pair.eps, drop,
                     needs_grad({&input, residual, pair.norm_weight, pair.norm_bias}));
  };
  const size_t count = layers.pairs.size();
  // The index of the pair with the norm, in the sub-layer that begins at pair i.
  const auto owner = [&](size_t i) {
    return i < count && layers.pairs[i].kind == kQueriesAndKeys ? i + 1 : i;
  };
  size_t dropout = 0;
  // Seeds are drawn in the order of nn.fusion.compose_bound.
  const auto probability = [&] {
    return dropout < layers.dropouts.size() ? layers.dropouts[dropout++] : 0.0;
  };
  Tensor x = *layers.x;  // the input, then with norm_first the residual sum
  Tensor inside = layers.norm_first ? normalized(layers.pairs[owner(0)], x, nullptr, {}).output : x;
  for (size_t i = 0; i < count; ++i) {
    const Pair* queries_and_keys =
        layers.pairs[i].kind == kQueriesAndKeys ? &layers.pairs[i] : nullptr;
    if (queries_and_keys) ++i;
    const Pair& pair = layers.pairs[i];
    const Drop within = Drop::draw(probability());
    Tensor y;
    if (pair.kind == kFeedForward)
      y = run_network(network, inside, *pair.weight1, pair.bias1, *pair.weight2, pair.bias2,
                      layers.activation, within,
                      needs_grad({&inside, pair.weight1, pair.bias1, pair.weight2, pair.bias2}));
    else
      y = map(attend(layers, pair, queries_and_keys, inside, within), *pair.weight2, pair.bias2);
    const double p = probability();
    const size_t next = owner(i + 1);
    if (!layers.norm_first) {
      x = inside = normalized(pair, y, &x, Drop::draw(p)).output;
    } else if (next < count && p == 0.0) {
      Normalized both = normalized(layers.pairs[next], y, &x, {});
      x = both.sum;
      inside = both.output;
    } else if (next < count && pair.kind != kFeedForward) {
      Normalized both = normalized(layers.pairs[next], y, &x, Drop::draw(p));
      x = both.sum;
      inside = both.output;
    } else {
      x = x + (p > 0.0 ? at::dropout(y, p, true) : y);
      if (next < count) inside = normalized(layers.pairs[next], x, nullptr, {}).output;
    }
  }
  return x;
}

// Arguments: x, kinds, parameters, eps, heads, norm_first, batch_first, activation, mask,
// is_causal, memory, its mask, is_causal, and the probabilities of dropout: for each
// sub-layer within it (attention weights, hidden units) and of its output; empty: none is active.
PyObject* enter_encoder_layer(Op& op, Arguments given, Py_ssize_t count) {
  if (count != 14 || !is_plain_state()) return dispatch();
  const Settings settings = current_settings();
  Layers layers{};
  layers.op = &op;
  layers.x = plain(given[0]);
  if (!settings.is_direct || !settings.falls_back || !layers.x || layers.x->dim() != 3 ||
      !is_float(*layers.x) || !layers.x->is_contiguous() || layers.x->numel() == 0 ||
      !PyList_Check(given[1]) || !PyList_Check(given[2]) || !PyList_Check(given[3]) ||
      !PyList_Check(given[13]) || !plain_or_none(given[8], layers.mask) ||
      !plain_or_none(given[10], layers.memory) || !plain_or_none(given[11], layers.memory_mask))
    return dispatch();
  const Tensor& x = *layers.x;
  layers.grad = needs_grad({&x, layers.memory});
  layers.heads = integer(given[4]);
  layers.batch_first = given[6] == Py_True;
  layers.norm_first = given[5] == Py_True;
  layers.causal = given[9] == Py_True;
  layers.memory_causal = given[12] == Py_True;
  layers.activation = activation_code(given[7]);
  if (layers.activation < 0 || layers.heads <= 0 || x.size(2) % layers.heads != 0 ||
      !read_pairs(layers, given[1], given[2], given[3]))
    return dispatch();
  const int64_t batch_dim = layers.batch_first ? 0 : 1, batch = x.size(batch_dim),
                length = x.size(1 - batch_dim);
  if (const Tensor* memory = layers.memory;
      memory &&
      (memory->dim() != 3 || !is_float(*memory) || !memory->is_contiguous() ||
       memory->size(batch_dim) != batch || memory->size(2) != x.size(2) || memory->numel() == 0))
    return dispatch();
  const auto fits = [&](const Tensor* mask, int64_t keys) {
    return !mask || (mask->scalar_type() == at::kBool &&
                     mask_fits(*mask, {batch, layers.heads, length, keys}, at::kFloat));
  };
  if (!fits(layers.mask, length) ||
      (layers.memory && !fits(layers.memory_mask, layers.memory->size(1 - batch_dim))) ||
      !are_small(layers))
    return dispatch();
  if (layers.grad) {
    if (!are_savable({&x, layers.memory})) return dispatch();
    for (const Pair& pair : layers.pairs)
      if (!are_savable({pair.weight1, pair.bias1, pair.weight2, pair.bias2, pair.norm_weight,
                        pair.norm_bias}))
        return dispatch();
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[13]); ++i) {
    const double p = number(PyList_GET_ITEM(given[13], i));
    if (!(p >= 0.0 && p < 1.0)) return dispatch();
    layers.dropouts.push_back(p);
  }
  if (layers.grad) return wrap(run_layers(layers));
  Tensor found;
  {
    const WithoutGil released(x.numel() * x.size(2));
    const Pool pool;
    found = run_layers(layers);
  }
  return wrap(std::move(found));
}

}  // namespace

TF_ENTRY(encoder_layer, enter_encoder_layer)

}  // namespace tf::autograd
