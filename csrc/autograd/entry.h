// Shared by the entries of all ops: the guard, the Python functions that they may call, and
// results. An entry runs small calls without the dispatcher.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <initializer_list>
#include <limits>
#include <optional>

#include "kernel_table.h"

namespace tf::autograd {

using at::Tensor;
using Arguments = PyObject* const*;

// The kernels of `_C`.
extern const KernelTable* kernels;

// Owns a reference, or is null after a Python error.
struct Reference {
  explicit Reference(PyObject* object) : object(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object); }
  PyObject* release() { return std::exchange(object, nullptr); }
  PyObject* object;
};

// Throws the current Python error as an exception.
[[noreturn]] inline void raise_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// True if `result`, a new reference, is Python's True; throws if it is null, a Python error.
inline bool is_true(PyObject* result) {
  const Reference value(result);
  if (!value.object) raise_python_error();
  return value.object == Py_True;
}

// An op: what `bind` sets, from transformer_fast/fast_path.py.
struct Op {
  const char* name;            // as profiles show it
  PyObject* record = nullptr;  // class of the op's arguments
  // The dispatcher's kernel as a function of the record; nullptr: all calls are dispatched.
  PyObject* direct = nullptr;
  PyObject* formula = nullptr;  // see Function::by_formula
  // Limits of a call's size, without gradients and with. Below `own` the entry runs the call. Below
  // `torch` PyTorch's op runs it, if it has at most `weights` weights or is smaller than
  // any_weights. Layers: see are_small.
  int64_t own[2] = {0, 0}, torch[2] = {0, 0}, weights = 0, any_weights = 0;
  unsigned limited = 0;  // dtypes whose training calls are dispatched, as bits of Element

  bool limits(const Tensor& tensor) const;
  bool prefers_torch(int64_t size, int64_t weight_count, bool grad) const {
    return size < torch[grad] && (weight_count <= weights || size < any_weights);
  }
};
Op* find_op(const char* name);

// The settings of the context (transformer_fast/_context.py).
struct Settings {
  bool is_direct = false;   // plain eager calls bypass the dispatcher
  bool falls_back = false;  // calls may run on other kernels for small sizes
};
Settings current_settings();

// True if a user's `TorchFunctionMode` is active: it must receive PyTorch's functions.
bool is_observed();

// `keys`, and the key `Named`, which PyTorch 2.10 excludes in backward passes. Later versions do
// not have it.
template <class Key = c10::DispatchKey>
c10::DispatchKeySet and_named(c10::DispatchKeySet keys) {
  if constexpr (requires { Key::Named; }) return keys | c10::DispatchKeySet(Key::Named);
  return keys;
}

// True if no mode, transform, tracer or autocast is active on this thread. All of them change the
// dispatch keys that the thread includes or excludes. So does inference mode, which is allowed.
inline bool is_plain_state() {
  using c10::DispatchKey;
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  auto included = c10::default_included_set;
  auto excluded = c10::default_excluded_set;
  if (c10::InferenceMode::is_enabled()) {
    included = included.remove(DispatchKey::ADInplaceOrView);
    excluded = excluded | c10::autograd_dispatch_keyset;
  }
  return keys.included_ == included && and_named(keys.excluded_) == and_named(excluded) &&
         !(at::impl::torch_function_mode_enabled() && is_observed());
}

// The keys of a strided CPU tensor whose memory alone describes it: of no subclass, not conjugated,
// negated, wrapped by a transform, sparse or nested.
inline bool has_plain_keys(const Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet allowed({DispatchKey::CPU, DispatchKey::AutogradCPU,
                                         DispatchKey::AutocastCPU, DispatchKey::ADInplaceOrView});
  const c10::DispatchKeySet keys = tensor.key_set();
  return (keys | allowed) == allowed && keys.has(DispatchKey::CPU);
}

// The tensor of an argument that is described by its memory alone, else nullptr.
inline const Tensor* plain(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const Tensor& tensor = THPVariable_Unpack(object);
  return has_plain_keys(tensor) && !tensor._fw_grad(0).defined() ? &tensor : nullptr;
}

// An optional argument; false if it is neither None nor plain.
inline bool plain_or_none(PyObject* object, const Tensor*& tensor) {
  tensor = object == Py_None ? nullptr : plain(object);
  return tensor != nullptr || object == Py_None;
}

inline std::optional<Element> element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Element::float32;
    case at::kBFloat16:
      return Element::bfloat16;
    case at::kHalf:
      return Element::float16;
    default:
      return std::nullopt;
  }
}
inline bool Op::limits(const Tensor& tensor) const {
  return limited >> static_cast<int>(*element_of(tensor)) & 1;
}
inline bool is_float(const Tensor& tensor) { return tensor.scalar_type() == at::kFloat; }

// True if all tensors have the dtype of the first; a nullptr does not count.
inline bool have_one_dtype(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* each : tensors)
    if (each && each->scalar_type() != (*tensors.begin())->scalar_type()) return false;
  return true;
}
inline bool are_contiguous(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* each : tensors)
    if (each && !each->is_contiguous()) return false;
  return true;
}
inline bool needs_grad(std::initializer_list<const Tensor*> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor* each : tensors)
    if (each && each->requires_grad()) return true;
  return false;
}
// Autograd cannot save inference tensors; the Python function copies them.
inline bool are_savable(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* each : tensors)
    if (each && each->is_inference()) return false;
  return true;
}

inline std::optional<Tensor> maybe(const Tensor* tensor) {
  return tensor ? std::optional<Tensor>(*tensor) : std::nullopt;
}
inline const void* data(const Tensor* tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}
inline const void* data(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// A scope in which the thread reuses the memory of intermediate results without references: an
// allocation takes as long as a small kernel.
class Pool {
 public:
  Pool() : outer_(std::exchange(current, this)) {}
  ~Pool() { current = outer_; }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Tensor take(at::IntArrayRef sizes, at::ScalarType type) {
    for (const Tensor& each : tensors_)
      if (each.use_count() == 1 && each.storage().use_count() == 1 && each.sizes() == sizes &&
          each.scalar_type() == type)
        return each;
    return tensors_.emplace_back(at::detail::empty_cpu(sizes, type));
  }
  static inline thread_local Pool* current = nullptr;

 private:
  Pool* outer_;
  c10::SmallVector<Tensor, 16> tensors_;
};

// Gradients of weights of 32 MiB or more need memory of the kernels' caching allocator, which
// entries do not use: malloc maps it anew in each step.
constexpr int64_t kMostWeights = 1 << 23;

// New tensors, without the dispatcher.
inline Tensor empty(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return Pool::current ? Pool::current->take(sizes, type) : at::detail::empty_cpu(sizes, type);
}
inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::detail::empty_strided_cpu(sizes, strides, type);
}
// The sizes of `input` with this number of columns.
inline c10::SmallVector<int64_t, 5> with_columns(const Tensor& input, int64_t columns) {
  c10::SmallVector<int64_t, 5> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  return sizes;
}

// Code of an activation, as in transformer_fast/ops/linear.py; -1 if no kernel supports it.
int activation_code(PyObject* name);
Tensor activate(const Tensor& input, int code);

// Results of an entry: None sends the call to the dispatcher.
inline PyObject* dispatch() { Py_RETURN_NONE; }
inline PyObject* wrap(Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }
inline PyObject* wrap(Tensor first, Tensor second) {
  PyObject* pair = PyTuple_New(2);
  PyTuple_SET_ITEM(pair, 0, wrap(std::move(first)));
  PyTuple_SET_ITEM(pair, 1, wrap(std::move(second)));
  return pair;
}
// Runs the kernel's Python function on these arguments, which were checked.
PyObject* run_direct(const Op& op, at::ArrayRef<PyObject*> arguments);

// Dropout of a call: its probability and its seed, an int64 scalar; none: 0 and no tensor.
struct Drop {
  double p = 0.0;
  Tensor seed;

  // Draws the seed as reference/dropout.py does.
  static Drop draw(double p) {
    if (p == 0.0) return {};
    return {p, at::randint(std::numeric_limits<int64_t>::max(), {}, at::kLong)};
  }
  Dropout kernel() const {
    return p == 0.0 ? Dropout{} : dropout_of(p, *seed.const_data_ptr<int64_t>());
  }
};

// Releases the GIL, if held, for work on `size` elements, unless it takes less time than releasing.
struct WithoutGil {
  explicit WithoutGil(int64_t size)
      : state_(size < 1 << 14 || !PyGILState_Check() ? nullptr : PyEval_SaveThread()) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace tf::autograd
