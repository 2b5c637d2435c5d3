// attention: scaled_dot_product_attention without lengths and weights.
#include <ATen/ExpandUtils.h>

#include <cmath>

#include "autograd/ops.h"

namespace tf::autograd {
namespace {

template <int dims>
void set_strides(Index (&strides)[dims], const Tensor& tensor) {
  for (int d = 0; d < dims; ++d) strides[d] = tensor.stride(d);
}

void set_mask(AttentionShape& shape, const Tensor& mask) {
  if (!mask.defined()) return;
  shape.mask = data(mask);
  shape.mask_type = element_of(mask).value_or(Element::boolean);
  const int64_t missing = 4 - mask.dim();  // dimensions that a mask (T, S) lacks
  for (int64_t d = missing; d < 4; ++d)
    shape.mask_stride[d] = mask.size(d - missing) == 1 ? 0 : mask.stride(d - missing);
}

// Sizes, strides and mask of (B, H, length, size) tensors, for forward and backward.
void set_shape(AttentionShape& shape, const Tensor& query, const Tensor& key, const Tensor& value,
               const Tensor& mask, bool causal, float scale) {
  shape.batch = query.size(0);
  shape.heads = query.size(1);
  shape.queries = query.size(2);
  shape.size = query.size(3);
  shape.key_heads = key.size(1);
  shape.keys = key.size(2);
  shape.value_size = value.size(3);
  shape.scale = scale;
  shape.causal = causal;
  set_strides(shape.query_stride, query);
  set_strides(shape.key_stride, key);
  set_strides(shape.value_stride, value);
  set_mask(shape, mask);
}

// An output with the strides of PyTorch's, as in ops/attention/attention.cpp.
Tensor output_like(const Tensor& query) {
  if (query.is_non_overlapping_and_dense())
    return empty_strided(query.sizes(), query.strides(), query.scalar_type());
  return empty_strided(query.sizes(), at::infer_dense_strides(query.sizes(), query.strides()),
                       query.scalar_type());
}

// A gradient with the tensor's order of heads and positions in memory.
Tensor gradient_like(const Tensor& tensor) {
  const int64_t b = tensor.size(0), h = tensor.size(1), t = tensor.size(2), d = tensor.size(3);
  if (tensor.stride(1) < tensor.stride(2))
    return empty_strided({b, h, t, d}, {t * h * d, d, h * d, 1}, tensor.scalar_type());
  return empty({b, h, t, d}, tensor.scalar_type());
}

// Runs the kernel; statistics: receives what a backward needs, or nullptr.
void run(AttentionArgs& args, const Tensor& output, const Drop& drop, Tensor* statistics) {
  const int64_t rows = args.batch * args.heads * args.queries;
  if (statistics) {
    *statistics = empty({2, rows});
    args.row_max = statistics->mutable_data_ptr<float>();
    args.row_sum = args.row_max + rows;
  }
  args.output = output.mutable_data_ptr();
  args.dropout = drop.kernel();
  const WithoutGil released(rows * args.keys * args.size);
  kernels->attention(args);
}

// Sets the tensors that a float32 forward saved; the shape in args is already set.
void set_saved(AttentionBackwardArgs& args, const Tensor& output, const Tensor& statistics,
               const Drop& drop) {
  args.type = Element::float32;
  args.output = data(output);
  args.row_max = statistics.const_data_ptr<float>();
  args.row_sum = args.row_max + args.batch * args.heads * args.queries;
  args.dominant = kDominantInFloat;
  args.dropout = drop.kernel();
}

// Inputs: query, key, value.
struct AttentionBackward : Function<3, 7> {
  enum { kQuery, kKey, kValue, kMask, kOutput, kStatistics, kSeed };
  double scale, p;
  bool causal;

  std::array<double, 3> numbers() const { return {scale, static_cast<double>(causal), p}; }
  variable_list run(const Given& given) const {
    const auto& [query, key, value, mask, output, statistics, seed] = given.tensors;
    const Tensor& grad = given.grads[0];
    if (!is_plain(given))
      return by_formula(given, {grad, query, key, value, mask, seed}, numbers());
    variable_list found(inputs);
    const Tensor dy = grad.stride(3) == 1 ? grad : grad.contiguous();
    AttentionBackwardArgs args{};
    set_shape(args, query, key, value, mask, causal, static_cast<float>(scale));
    set_saved(args, output, statistics, {p, seed});
    args.query = data(query);
    args.key = data(key);
    args.value = data(value);
    args.grad = data(dy);
    set_strides(args.output_stride, output);
    set_strides(args.grad_stride, dy);
    void** results[] = {&args.grad_query, &args.grad_key, &args.grad_value};
    Index(*strides[])[3] = {&args.grad_query_stride, &args.grad_key_stride,
                            &args.grad_value_stride};
    for (int i = 0; i < 3; ++i) {
      if (!given.wants[i]) continue;
      found[i] = gradient_like(given.tensors[i]);
      *results[i] = found[i].mutable_data_ptr();
      set_strides(*strides[i], found[i]);
    }
    kernels->attention_backward(args);
    return found;
  }
};

Tensor attend(const Op& op, const Tensor& query, const Tensor& key, const Tensor& value,
              const Tensor* mask, double scale, bool causal, const Drop& drop, bool grad) {
  RECORD_FUNCTION(op.name, c10::ArrayRef<const c10::IValue>{});
  // With dropout PyTorch's output is contiguous.
  Tensor output = drop.p > 0.0 ? empty(query.sizes(), query.scalar_type()) : output_like(query);
  AttentionArgs args{};
  set_shape(args, query, key, value, mask ? *mask : Tensor(), causal, static_cast<float>(scale));
  args.type = *element_of(query);
  args.query = data(query);
  args.key = data(key);
  args.value = data(value);
  set_strides(args.output_stride, output);
  Tensor statistics;
  run(args, output, drop, grad ? &statistics : nullptr);
  if (!grad) return output;
  auto node = make_node<AttentionBackward>(op, query, key, value);
  node->scale = scale;
  node->causal = causal;
  node->p = drop.p;
  torch::autograd::set_history(output, node);
  node->save(AttentionBackward::kQuery, &query);
  node->save(AttentionBackward::kKey, &key);
  node->save(AttentionBackward::kValue, &value);
  node->save(AttentionBackward::kMask, mask);
  node->save(AttentionBackward::kOutput, output, true);
  node->save(AttentionBackward::kStatistics, statistics);
  node->save(AttentionBackward::kSeed, drop.seed);
  return output;
}

// Arguments: query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, and a function:
// true for float masks that were checked for 0 and 1 (functional/masks.py).
PyObject* enter_attention(Op& op, Arguments given, Py_ssize_t count) {
  if (!op.direct || count != 9 || !is_plain_state() || !current_settings().is_direct ||
      !PyFloat_CheckExact(given[4]) || !PyBool_Check(given[5]) || !PyBool_Check(given[7]) ||
      !(given[6] == Py_None || PyFloat_CheckExact(given[6])))
    return dispatch();
  const Tensor *query = plain(given[0]), *key = plain(given[1]), *value = plain(given[2]),
               *mask = nullptr;
  const bool causal = given[5] == Py_True, grouped = given[7] == Py_True;
  const double p = PyFloat_AS_DOUBLE(given[4]);
  if (!(p >= 0.0 && p < 1.0)) return dispatch();
  if (!query || !key || !value || !plain_or_none(given[3], mask) || query->dim() != 4 ||
      key->dim() != 4 || key->sizes() != value->sizes() || !element_of(*query) ||
      !have_one_dtype({query, key, value}) || query->size(0) != key->size(0) ||
      query->size(3) != key->size(3))
    return dispatch();
  const int64_t heads = query->size(1), key_heads = key->size(1);
  if (heads != key_heads && !(grouped && key_heads > 0 && heads % key_heads == 0))
    return dispatch();
  if (mask &&
      (causal || !mask_fits(*mask, {query->size(0), query->size(1), query->size(2), key->size(2)},
                            query->scalar_type())))
    return dispatch();
  if (mask && mask->scalar_type() != at::kBool && !is_true(PyObject_CallOneArg(given[8], given[3])))
    return dispatch();
  const bool grad = needs_grad({query, key, value});
  const int64_t size = query->numel() * key->size(2);
  const auto is_unit = [](const Tensor* tensor) { return tensor->stride(3) == 1; };
  if (is_float(*query) && size > 0 && size < op.own[grad] && is_unit(query) && is_unit(key) &&
      is_unit(value) && (!grad || are_savable({query, key, value, mask}))) {
    const double scale = given[6] == Py_None ? 1.0 / std::sqrt(static_cast<double>(query->size(3)))
                                             : PyFloat_AS_DOUBLE(given[6]);
    return wrap(attend(op, *query, *key, *value, mask, scale, causal, Drop::draw(p), grad));
  }
  if (p > 0.0 || (grad && op.limits(*query))) return dispatch();
  PyObject* given_mask = given[3];
  const Reference wide(mask && mask->dim() == 2 ? wrap(mask->unsqueeze(0).unsqueeze(0)) : nullptr);
  if (wide.object) given_mask = wide.object;
  const Reference both(run_direct(op, {given[0], given[1], given[2], given_mask, Py_None, given[5],
                                       given[6], given[4], Py_None, given[7]}));
  if (!both.object) return nullptr;
  return Py_NewRef(PyTuple_GET_ITEM(both.object, 0));  // (output, None)
}

// The number of columns of the queries, equal to that of keys and of values.
int64_t width_of(const HeadParts& parts) {
  int64_t columns = 0;
  for (const Tensor& each : parts.tensors) columns += each.defined() ? each.size(2) : 0;
  return columns / 3;
}

// Calls set(i, t, column) for queries, keys and values: part i begins at this column of tensor t.
template <class Set>
void each_part(const HeadParts& parts, const Set& set) {
  const int64_t width = width_of(parts);
  for (int i = 0, t = 0; i < 3; ++t)
    for (int64_t at = 0; at < parts.tensors[t].size(2); at += width) set(i++, t, at);
}

// Sets sizes, mask, pointers and strides.
template <class Args>
void set_parts(Args& args, const HeadParts& parts, const Tensor& output, const Tensor& mask,
               bool causal) {
  const int batch = parts.batch_first ? 0 : 1;
  const int64_t size = width_of(parts) / parts.heads;
  args.batch = output.size(batch);
  args.heads = args.key_heads = parts.heads;
  args.queries = output.size(1 - batch);
  args.size = args.value_size = size;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  args.causal = causal;
  args.type = Element::float32;
  const auto set = [&](auto& strides, const Tensor& tensor) {
    strides[0] = tensor.stride(batch);
    strides[1] = size;
    strides[2] = tensor.stride(1 - batch);
  };
  const void** data[] = {&args.query, &args.key, &args.value};
  decltype(args.query_stride)* strides[] = {&args.query_stride, &args.key_stride,
                                            &args.value_stride};
  each_part(parts, [&](int i, int t, int64_t column) {
    const Tensor& tensor = parts.tensors[t];
    *data[i] = tensor.const_data_ptr<float>() + column;
    set(*strides[i], tensor);
    (*strides[i])[3] = 1;
    if (i > 0) args.keys = tensor.size(1 - batch);
  });
  set(args.output_stride, output);
  set_mask(args, mask);
}

// Inputs: the tensors of HeadParts.
struct PartsBackward : Function<3, 7> {
  enum { kMask = 3, kOutput, kStatistics, kSeed };
  int64_t heads;
  bool batch_first, causal;
  double p;

  std::array<double, 4> numbers() const {
    return {static_cast<double>(heads), static_cast<double>(batch_first),
            static_cast<double>(causal), p};
  }
  variable_list run(const Given& given) const {
    const auto& [first, second, third, mask, output, statistics, seed] = given.tensors;
    if (!is_plain(given))
      return by_formula(given, {given.grads[0], first, second, third, mask, seed}, numbers());
    variable_list found(inputs);
    const Tensor dy = given.grads[0].contiguous();
    const HeadParts parts{heads, batch_first, {first, second, third}};
    AttentionBackwardArgs args{};
    set_parts(args, parts, output, mask, causal);
    set_saved(args, output, statistics, {p, seed});
    args.grad = data(dy);
    for (int d = 0; d < 3; ++d) args.grad_stride[d] = args.output_stride[d];
    void** results[] = {&args.grad_query, &args.grad_key, &args.grad_value};
    Index(*strides[])[3] = {&args.grad_query_stride, &args.grad_key_stride,
                            &args.grad_value_stride};
    Index(*like[])[4] = {&args.query_stride, &args.key_stride, &args.value_stride};
    each_part(parts, [&](int i, int t, int64_t column) {
      if (!given.wants[t]) return;
      if (!found[t].defined()) found[t] = empty(parts.tensors[t].sizes());
      *results[i] = found[t].mutable_data_ptr<float>() + column;
      for (int d = 0; d < 3; ++d) (*strides[i])[d] = (*like[i])[d];
    });
    kernels->attention_backward(args);
    return found;
  }
};

// compile/run_time.prepare_hidden in one pass over a small mask. Arguments: condition, hides,
// whether the fill is finite, rank of the scores; returns the fields of its Mask.
PyObject* enter_hidden_mask(Op&, Arguments given, Py_ssize_t count) {
  const Tensor* condition = count == 4 && is_plain_state() ? plain(given[0]) : nullptr;
  if (!condition || condition->scalar_type() != at::kBool || condition->dim() > 4 ||
      !condition->is_contiguous() || condition->numel() == 0 || condition->numel() >= 1 << 16)
    return dispatch();
  const bool hides = given[1] == Py_True, is_finite = given[2] == Py_True;
  int64_t sizes[] = {1, 1, 1, 1};
  std::copy(condition->sizes().begin(), condition->sizes().end(), sizes + 4 - condition->dim());
  // Three dimensions are (B, T, S), if the scores have no more.
  if (condition->dim() == 3 && PyLong_AsLong(given[3]) == 3) std::swap(sizes[0], sizes[1]);
  const int64_t length = sizes[2], keys = sizes[3], count_all = condition->numel();
  Tensor visible = empty(sizes, at::kBool), hidden_rows;
  const auto* from = condition->const_data_ptr<bool>();
  auto* to = visible.mutable_data_ptr<bool>();
  std::transform(from, from + count_all, to, [&](bool value) { return value != hides; });
  const auto answer = [](Tensor mask, Tensor fully_masked, bool causal) {
    return Py_BuildValue("(NNN)", wrap(std::move(mask)), wrap(std::move(fully_masked)),
                         PyBool_FromLong(causal));
  };
  if (std::find(to, to + count_all, false) == to + count_all) return answer({}, {}, false);
  for (int64_t i = 0; i < count_all && is_finite; i += keys) {
    if (std::find(to + i, to + i + keys, true) != to + i + keys) continue;
    if (!hidden_rows.defined()) hidden_rows = at::zeros({sizes[0], sizes[1], length, 1}, at::kBool);
    hidden_rows.mutable_data_ptr<bool>()[i / keys] = true;
    std::fill_n(to + i, keys, true);
  }
  if (hidden_rows.defined()) return answer(visible, hidden_rows, false);
  bool is_causal = length == keys && length > 1;
  for (int64_t i = 0; i < count_all && is_causal; ++i) {
    const int64_t row = i / keys, last = (row / length + 1) * length - 1, j = i % keys;
    is_causal = to[i] == (j <= row % length && to[last * keys + j]);
  }
  if (!is_causal) return answer(visible, {}, false);
  const Tensor padding = visible.narrow(2, length - 1, 1);
  return answer(padding.all().item<bool>() ? Tensor() : padding, {}, true);
}

}  // namespace

bool mask_fits(const Tensor& mask, at::IntArrayRef sizes, at::ScalarType type) {
  if ((mask.dim() != 2 && mask.dim() != 4) || mask.requires_grad()) return false;
  if (mask.scalar_type() != at::kBool && !is_float(mask) && mask.scalar_type() != type)
    return false;
  for (int64_t d = 0; d < mask.dim(); ++d)
    if (mask.size(d) != 1 && mask.size(d) != sizes[4 - mask.dim() + d]) return false;
  return true;
}

Tensor attend_parts(const Op& op, const HeadParts& parts, const Tensor* mask, bool causal,
                    const Drop& drop, bool grad) {
  RECORD_FUNCTION("transformer_fast::attention", c10::ArrayRef<const c10::IValue>{});
  const auto& [first, second, third] = parts.tensors;
  Tensor output = empty(with_columns(first, width_of(parts))), statistics;
  AttentionArgs args{};
  set_parts(args, parts, output, mask ? *mask : Tensor(), causal);
  run(args, output, drop, grad ? &statistics : nullptr);
  if (!grad) return output;
  auto node = make_node<PartsBackward>(op, first, second, third);
  node->heads = parts.heads;
  node->batch_first = parts.batch_first;
  node->causal = causal;
  node->p = drop.p;
  torch::autograd::set_history(output, node);
  for (int t = 0; t < 3; ++t) node->save(t, parts.tensors[t]);
  node->save(PartsBackward::kMask, mask);
  node->save(PartsBackward::kOutput, output, true);
  node->save(PartsBackward::kStatistics, statistics);
  node->save(PartsBackward::kSeed, drop.seed);
  return output;
}

TF_ENTRY(attention, enter_attention)
TF_ENTRY(hidden_mask, enter_hidden_mask)

}  // namespace tf::autograd
