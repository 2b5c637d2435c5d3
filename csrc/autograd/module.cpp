// Python module transformer_fast._autograd: entries of small calls, with autograd nodes in C++.
// Unlike `_C` it uses PyTorch's whole C++ API, so it serves only the PyTorch that it was built
// with.
#include <string_view>
#include <utility>

#include "autograd/ops.h"
#include "build_config.h"

namespace tf::autograd {

const KernelTable* kernels = nullptr;

namespace {

#define TF_OP(op) Op{"transformer_fast::" #op},
Op ops[] = {TF_ENTRIES(TF_OP)};
#undef TF_OP

PyObject *settings_variable, *process_settings, *is_direct_name, *falls_back_name;
PyObject* observed_function;

}  // namespace

Op* find_op(const char* name) {
  for (Op& op : ops)
    if (std::string_view(op.name).substr(std::string_view("transformer_fast::").size()) == name)
      return &op;
  TORCH_CHECK(false, "there is no op ", name);
}

Settings current_settings() {
  PyObject* found = nullptr;
  if (PyContextVar_Get(settings_variable, process_settings, &found) < 0) raise_python_error();
  const Reference settings(found);
  return {is_true(PyObject_GetAttr(settings.object, is_direct_name)),
          is_true(PyObject_GetAttr(settings.object, falls_back_name))};
}

int activation_code(PyObject* name) {
  if (!PyUnicode_CheckExact(name)) return -1;
  constexpr std::pair<const char*, int> codes[] = {
      {"relu", kRelu}, {"gelu", kGelu}, {"gelu_tanh", kGeluTanh}, {"silu", kSilu}};
  for (const auto& [each, code] : codes)
    if (PyUnicode_CompareWithASCIIString(name, each) == 0) return code;
  return -1;
}

Tensor activate(const Tensor& input, int code) {
  switch (code) {
    case kRelu:
      return at::relu(input);
    case kGelu:
      return at::gelu(input);
    case kGeluTanh:
      return at::gelu(input, "tanh");
    case kSilu:
      return at::silu(input);
    default:
      return input;
  }
}

PyObject* run_direct(const Op& op, at::ArrayRef<PyObject*> arguments) {
  const Reference record(
      PyObject_Vectorcall(op.record, arguments.begin(), arguments.size(), nullptr));
  return record.object ? PyObject_CallOneArg(op.direct, record.object) : nullptr;
}

bool is_observed() { return is_true(PyObject_CallNoArgs(observed_function)); }

namespace {

PyObject* connect(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *table, *variable, *settings, *observed;
  if (!PyArg_ParseTuple(arguments, "OOOO", &table, &variable, &settings, &observed)) return nullptr;
  kernels = static_cast<const KernelTable*>(PyCapsule_GetPointer(table, kKernelTable));
  if (!kernels) return nullptr;
  settings_variable = Py_NewRef(variable);
  process_settings = Py_NewRef(settings);
  observed_function = Py_NewRef(observed);
  is_direct_name = PyUnicode_InternFromString("is_direct");
  falls_back_name = PyUnicode_InternFromString("falls_back");
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* bind(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char* name;
  PyObject *record, *direct, *formula;
  long long own, own_training, inference, training, weights, any_weights;
  unsigned limited;
  if (!PyArg_ParseTuple(arguments, "sOOOLLLLLLI", &name, &record, &direct, &formula, &own,
                        &own_training, &inference, &training, &weights, &any_weights, &limited))
    return nullptr;
  Op& op = *find_op(name);
  // Old functions stay alive: nodes of earlier calls use them.
  op.record = Py_NewRef(record);
  op.direct = direct == Py_None ? nullptr : Py_NewRef(direct);
  op.formula = Py_NewRef(formula);
  op.own[0] = own;
  op.own[1] = own_training;
  op.torch[0] = inference;
  op.torch[1] = training;
  op.weights = weights;
  op.any_weights = any_weights;
  op.limited = limited;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

#define TF_METHOD(op)                                                                    \
  {#op, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&op)), METH_FASTCALL, \
   "Returns the result of " #op ", or None for a call that must be dispatched."},
PyMethodDef methods[] = {
    TF_ENTRIES(TF_METHOD){"connect", connect, METH_VARARGS,
                          "Takes the kernels of `_C`, the settings and `is_observed`."},
    {"holds", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&holds)), METH_FASTCALL,
     "True if all checks of a Guard hold."},
    {"are_unchanged", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&are_unchanged)),
     METH_FASTCALL, "True if tensors have the states that were recorded."},
    {"tape", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&make_tape)), METH_FASTCALL,
     "Returns a captured graph as a function that runs natively."},
    {"bind", bind, METH_VARARGS, "Sets the functions and the limits of an op."},
    {nullptr, nullptr, 0, nullptr}};
#undef TF_METHOD

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_autograd", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace tf::autograd

PyMODINIT_FUNC PyInit__autograd() {
  PyObject* module = PyModule_Create(&tf::autograd::definition);
  if (!module) return nullptr;
  PyModule_AddStringConstant(module, "torch_version", TF_BUILD_TORCH);
  PyModule_AddIntConstant(module, "most_weights", tf::autograd::kMostWeights);
  return module;
}
