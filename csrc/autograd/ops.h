// The entries of ops, and the steps of their nodes.
#pragma once

#include "autograd/backward.h"

namespace tf::autograd {

// By name of the op: (arguments of the public function) -> its result, or None for a call that must
// be dispatched. They do not accept keywords.
// clang-format off
#define TF_ENTRIES(X)                                                                   \
  X(layer_norm) X(add_layer_norm) X(rms_norm) X(add_rms_norm) X(linear) X(feed_forward) \
  X(attention) X(hidden_mask) X(encoder_layer) X(cross_entropy) X(linear_cross_entropy)
// clang-format on

#define TF_DECLARE_ENTRY(op) PyObject* op(PyObject* module, Arguments given, Py_ssize_t count);
TF_ENTRIES(TF_DECLARE_ENTRY)
#undef TF_DECLARE_ENTRY

// See guard.cpp.
PyObject* holds(PyObject* module, Arguments given, Py_ssize_t count);
PyObject* are_unchanged(PyObject* module, Arguments given, Py_ssize_t count);
// See tape.cpp.
PyObject* make_tape(PyObject* module, Arguments given, Py_ssize_t count);

// Defines an entry; exceptions of C++ become those of Python.
#define TF_ENTRY(op, function)                                 \
  PyObject* op(PyObject*, Arguments given, Py_ssize_t count) { \
    HANDLE_TH_ERRORS                                           \
    static Op& own = *find_op(#op);                            \
    return function(own, given, count);                        \
    END_HANDLE_TH_ERRORS                                       \
  }

// True if weight and bias fit inputs with this many columns.
bool fits(int64_t columns, const Tensor& weight, const Tensor* bias);

// The steps: each runs a kernel on plain contiguous float32 tensors (norms: of any element type)
// and records its node if gradients are needed.
Tensor multiply(const Op& op, const Tensor& x, const Tensor& weight, const Tensor* bias,
                int activation, bool grad);

Tensor run_network(const Op& op, const Tensor& x, const Tensor& weight1, const Tensor* bias1,
                   const Tensor& weight2, const Tensor* bias2, int activation, const Drop& drop,
                   bool grad);

// The tensors of a norm; those that a call lacks are nullptr.
struct Norm {
  const Tensor *input, *residual = nullptr, *weight = nullptr, *bias = nullptr;
};
struct Normalized {
  Tensor output, sum;
};
Normalized normalize(const Op& op, const Norm& norm, NormKind kind, float eps, const Drop& drop,
                     bool grad);

// Queries, keys and values of attention, each (B, T, M), or (T, B, M) if not batch_first. The first
// tensor holds one, two or all three of them side by side, the other tensors hold the rest.
struct HeadParts {
  int64_t heads;
  bool batch_first;
  std::array<Tensor, 3> tensors;
};
// Returns the joined heads, (B, T, M) or (T, B, M). op: the layer's.
Tensor attend_parts(const Op& op, const HeadParts& parts, const Tensor* mask, bool causal,
                    const Drop& drop, bool grad);
// True if a mask has two or four dimensions, broadcasts to (B, H, T, S), is bool, float32 or in the
// query's dtype, and does not require a gradient.
bool mask_fits(const Tensor& mask, at::IntArrayRef sizes, at::ScalarType type);

}  // namespace tf::autograd
