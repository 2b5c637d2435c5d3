// holds: verifies the checks of a transformer_fast.nn.guard.Guard in one pass. are_unchanged:
// compares tensors with their earlier states.
#include "autograd/ops.h"

namespace tf::autograd {
namespace {

// The value of a key, borrowed; nullptr: there is none, or the mapping is no dict.
PyObject* value_of(PyObject* mapping, PyObject* key) {
  if (!PyDict_Check(mapping)) return nullptr;
  PyObject* found = PyDict_GetItemWithError(mapping, key);
  if (!found && PyErr_Occurred()) raise_python_error();
  return found;
}

PyObject* item(PyObject* tuple, Py_ssize_t place) { return PyTuple_GET_ITEM(tuple, place); }

// True if two dicts have equal entries. Identical objects in the same order need no look-ups.
bool are_equal(PyObject* one, PyObject* other) {
  if (PyDict_CheckExact(one) && PyDict_CheckExact(other) &&
      PyDict_GET_SIZE(one) == PyDict_GET_SIZE(other)) {
    Py_ssize_t at = 0, other_at = 0;
    PyObject *key, *value, *other_key, *other_value;
    bool same = true;
    while (same && PyDict_Next(one, &at, &key, &value))
      same = PyDict_Next(other, &other_at, &other_key, &other_value) && key == other_key &&
             value == other_value;
    if (same) return true;
  }
  const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (equal < 0) PyErr_Clear();  // an attribute is another tensor, or another array
  return equal == 1;
}

// Calls check(tuple) for each tuple of a list until it returns false.
template <class Check>
bool all(PyObject* list, const Check& check) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
    if (!check(PyList_GET_ITEM(list, i))) return false;
  return true;
}

bool are_sizes(c10::IntArrayRef sizes, PyObject* tuple) {
  if (PyTuple_GET_SIZE(tuple) != static_cast<Py_ssize_t>(sizes.size())) return false;
  for (size_t i = 0; i < sizes.size(); ++i)
    if (PyLong_AsLongLong(item(tuple, static_cast<Py_ssize_t>(i))) != sizes[i]) return false;
  return true;
}

}  // namespace

// Argument: a list of (owner, tensor, state), see transformer_fast.memory.are_unchanged.
PyObject* are_unchanged(PyObject*, Arguments given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const bool found = all(given[0], [](PyObject* one) {
    const Tensor &owner = THPVariable_Unpack(item(one, 0)), &x = THPVariable_Unpack(item(one, 1));
    PyObject* state = item(one, 2);
    return PyLong_AsLongLong(item(state, 0)) == static_cast<int64_t>(owner._version()) &&
           PyLong_AsVoidPtr(item(state, 1)) == x.const_data_ptr() &&
           are_sizes(x.sizes(), item(state, 2)) && are_sizes(x.strides(), item(state, 3)) &&
           reinterpret_cast<PyObject*>(torch::getTHPDtype(x.scalar_type())) == item(state, 4);
  });
  return PyBool_FromLong(found);
  END_HANDLE_TH_ERRORS
}

// Arguments: the lists `values`, `empty`, `classes`, `methods` and `equal` of a Guard, and
// `ABSENT`.
PyObject* holds(PyObject*, Arguments given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* absent = given[5];
  const bool found =
      all(given[0],
          [&](PyObject* one) {
            PyObject* value = value_of(item(one, 0), item(one, 1));
            return (value ? value : absent) == item(one, 2);
          }) &&
      all(given[1],
          [](PyObject* one) {
            PyObject* value = value_of(item(one, 0), item(one, 1));
            const int size = value ? PyObject_IsTrue(value) : 1;
            if (size < 0) raise_python_error();
            return size == 0;
          }) &&
      all(given[2],
          [](PyObject* one) {
            return reinterpret_cast<PyObject*>(Py_TYPE(item(one, 0))) == item(one, 1);
          }) &&
      all(given[3],
          [](PyObject* one) {
            const Reference method(PyObject_GetAttr(item(one, 0), item(one, 1)));
            if (!method.object) PyErr_Clear();
            return method.object == item(one, 2) || (!method.object && item(one, 2) == Py_None);
          }) &&
      all(given[4], [](PyObject* one) { return are_equal(item(one, 0), item(one, 1)); });
  return PyBool_FromLong(found);
  END_HANDLE_TH_ERRORS
}

}  // namespace tf::autograd
