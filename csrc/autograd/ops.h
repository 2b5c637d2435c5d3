// The entries, by name of the op: (arguments of the public function) -> its result, or None for a
// call that must be dispatched. They do not accept keywords.
#pragma once

#include "autograd/entry.h"

namespace tf::autograd {

#define TF_ENTRIES(X) \
  X(layer_norm)       \
  X(add_layer_norm)   \
  X(rms_norm) X(add_rms_norm) X(linear) X(feed_forward) X(attention) X(encoder_layer)

#define TF_DECLARE_ENTRY(op) PyObject* op(PyObject* module, Arguments given, Py_ssize_t count);
TF_ENTRIES(TF_DECLARE_ENTRY)
#undef TF_DECLARE_ENTRY

// See guard.cpp.
PyObject* holds(PyObject* module, Arguments given, Py_ssize_t count);

// Defines an entry; exceptions of C++ become those of Python.
#define TF_ENTRY(op, function)                                 \
  PyObject* op(PyObject*, Arguments given, Py_ssize_t count) { \
    HANDLE_TH_ERRORS                                           \
    static Op& own = *find_op(#op);                            \
    return function(own, given, count);                        \
    END_HANDLE_TH_ERRORS                                       \
  }

}  // namespace tf::autograd
