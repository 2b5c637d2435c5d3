// tape: a captured graph as a list of instructions that one call runs. An instruction calls an
// entry, an operator of PyTorch without its Python binding, or a Python function.
#include <ATen/Functions.h>

#include <memory>
#include <vector>

#include "autograd/ops.h"

namespace tf::autograd {
namespace {

using Tensors = at::ArrayRef<const Tensor*>;
using Numbers = at::ArrayRef<at::Scalar>;

c10::SmallVector<int64_t, 5> integers(Numbers numbers) {
  c10::SmallVector<int64_t, 5> found;
  for (const at::Scalar& each : numbers) found.push_back(each.toLong());
  return found;
}

// Basic indexing. Three numbers for each index: its kind; the position (kSelect) or the start
// (kSlice); the end (kSlice).
enum IndexKind { kNewDimension, kAll, kSelect, kSlice };
Tensor index(Tensor x, Numbers n) {
  int64_t dim = 0;
  for (size_t i = 0; i < n.size(); i += 3) {
    switch (n[i].toLong()) {
      case kNewDimension:
        x = x.unsqueeze(dim++);
        break;
      case kAll:
        ++dim;
        break;
      case kSelect:
        x = x.select(dim, n[i + 1].toLong());
        break;
      case kSlice:
        x = x.slice(dim++, n[i + 1].toLong(), n[i + 2].toLong());
        break;
    }
  }
  return x;
}

// An operator of PyTorch as a function of tensors and numbers.
struct Operator {
  const char* name;
  Tensor (*run)(Tensors t, Numbers n);
};
#define TF_BINARY(op)                                                        \
  {#op, [](Tensors t, Numbers n) {                                           \
     return t.size() == 2 ? at::op(*t[0], *t[1]) : at::op(*t[0], n.front()); \
   }},
#define TF_RESHAPE(op, ...) \
  {#op, [](Tensors t, [[maybe_unused]] Numbers n) { return t[0]->op(__VA_ARGS__); }},
constexpr Operator kOperators[] = {
    // clang-format off
    TF_BINARY(add) TF_BINARY(sub) TF_BINARY(mul) TF_BINARY(div) TF_BINARY(eq) TF_BINARY(ne)
    TF_BINARY(lt) TF_BINARY(le) TF_BINARY(gt) TF_BINARY(ge) TF_BINARY(bitwise_and)
    TF_BINARY(bitwise_or)
    TF_RESHAPE(view, integers(n)) TF_RESHAPE(reshape, integers(n)) TF_RESHAPE(permute, integers(n))
    TF_RESHAPE(transpose, n[0].toLong(), n[1].toLong()) TF_RESHAPE(unsqueeze, n[0].toLong())
    TF_RESHAPE(contiguous)
    // clang-format on
    {"bitwise_not", [](Tensors t, Numbers) { return at::bitwise_not(*t[0]); }},
    {"index", [](Tensors t, Numbers n) { return index(*t[0], n); }},
    // Tensors: indices, table. Number: padding_idx.
    {"embedding", [](Tensors t, Numbers n) { return at::embedding(*t[1], *t[0], n[0].toLong()); }},
};

// An argument of an instruction.
struct Operand {
  enum Kind { kSlot, kConstant, kList, kMask, kCausal } kind;
  int slot = -1;
  PyObject* constant = nullptr;  // kCausal: the value if the slot has no mask
  std::vector<int> slots;        // kList; -1: None
};

struct Instruction {
  const Operator* op = nullptr;
  PyObject* entry = nullptr;   // nullptr: there is none
  PyObject* finish = nullptr;  // called with the entry's result or its items; nullptr: none
  std::vector<Operand> operands;
  PyObject* function = nullptr;  // the same in Python, as a function of the values of `inputs`
  std::vector<int> inputs, results, released;
};

struct Tape {
  PyObject* function = nullptr;  // the whole graph in Python
  int inputs = 0, slots = 0;
  std::vector<PyObject*> constants;  // in the slots after those of the inputs
  std::vector<Instruction> instructions;
  std::vector<int> outputs;

  ~Tape() {
    for (const Instruction& each : instructions) {
      Py_XDECREF(each.entry);
      Py_XDECREF(each.finish);
      Py_XDECREF(each.function);
      for (const Operand& operand : each.operands) Py_XDECREF(operand.constant);
    }
    for (PyObject* each : constants) Py_DECREF(each);
    Py_XDECREF(function);
  }
};

// The values of a call, which owns all except the inputs and constants.
struct Values {
  Values(const Tape& tape, Arguments given)
      : owned(tape.inputs + tape.constants.size()), at(tape.slots) {
    std::copy_n(given, tape.inputs, at.begin());
    std::copy(tape.constants.begin(), tape.constants.end(), at.begin() + tape.inputs);
  }
  ~Values() {
    for (size_t i = owned; i < at.size(); ++i) Py_XDECREF(at[i]);
  }
  void release(int slot) { Py_CLEAR(at[slot]); }
  PyObject* operator[](int slot) const { return slot < 0 ? Py_None : at[slot]; }

  size_t owned;
  c10::SmallVector<PyObject*, 256> at;
};

// Reads a number; false if it is none.
bool read_number(PyObject* object, c10::SmallVectorImpl<at::Scalar>& numbers) {
  if (PyFloat_CheckExact(object)) {
    numbers.emplace_back(PyFloat_AS_DOUBLE(object));
    return true;
  }
  int overflow = 0;
  if (!PyLong_CheckExact(object)) return false;
  const int64_t found = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (!overflow) numbers.emplace_back(found);
  return !overflow;
}

// Returns a new reference; nullptr: the operator must run in Python.
PyObject* run_operator(const Instruction& one, const Values& values) {
  c10::SmallVector<const Tensor*, 2> tensors;
  c10::SmallVector<at::Scalar, 8> numbers;
  int64_t size = 0;
  for (const Operand& each : one.operands) {
    PyObject* value = each.kind == Operand::kConstant ? each.constant : values[each.slot];
    if (const Tensor* tensor = plain(value)) {
      tensors.push_back(tensor);
      size = std::max(size, tensor->numel());
    } else if (!read_number(value, numbers)) {
      return nullptr;
    }
  }
  Tensor found;
  {
    const WithoutGil released(size);
    found = one.op->run(tensors, numbers);
  }
  return wrap(std::move(found));
}

// Returns a new reference; nullptr: the call must run in Python, or an error is set.
PyObject* run_entry(const Instruction& one, const Values& values) {
  c10::SmallVector<PyObject*, 16> arguments;
  const Reference lists(PyList_New(0));
  for (const Operand& each : one.operands) {
    switch (each.kind) {
      case Operand::kSlot:
        arguments.push_back(values[each.slot]);
        break;
      case Operand::kConstant:
        arguments.push_back(each.constant);
        break;
      case Operand::kList: {
        const auto count = static_cast<Py_ssize_t>(each.slots.size());
        const Reference list(PyList_New(count));
        for (Py_ssize_t i = 0; i < count; ++i)
          PyList_SET_ITEM(list.object, i, Py_NewRef(values[each.slots[i]]));
        PyList_Append(lists.object, list.object);
        arguments.push_back(list.object);
        break;
      }
      case Operand::kMask:
      case Operand::kCausal: {
        const bool is_mask = each.kind == Operand::kMask;
        PyObject* mask = values[each.slot];  // a run_time.Mask or None
        if (mask == Py_None) {
          arguments.push_back(is_mask ? mask : each.constant);
          break;
        }
        if (!PyTuple_Check(mask) || PyTuple_GET_ITEM(mask, 1) != Py_None) return nullptr;
        arguments.push_back(PyTuple_GET_ITEM(mask, is_mask ? 0 : 2));
        break;
      }
    }
  }
  Reference found(PyObject_Vectorcall(one.entry, arguments.data(), arguments.size(), nullptr));
  if (found.object == Py_None) return nullptr;
  if (!found.object || !one.finish) return found.release();
  return PyTuple_Check(found.object) ? PyObject_CallObject(one.finish, found.object)
                                     : PyObject_CallOneArg(one.finish, found.object);
}

PyObject* run_function(const Instruction& one, const Values& values) {
  c10::SmallVector<PyObject*, 16> arguments;
  for (const int slot : one.inputs) arguments.push_back(values[slot]);
  return PyObject_Vectorcall(one.function, arguments.data(), arguments.size(), nullptr);
}

bool is_plain_now() {
  if (!is_plain_state()) return false;
  const Settings settings = current_settings();
  return settings.is_direct && settings.falls_back;
}

PyObject* run_tape(PyObject* capsule, Arguments given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Tape& tape = *static_cast<const Tape*>(PyCapsule_GetPointer(capsule, nullptr));
  bool is_plain = is_plain_now();
  if (!is_plain || count != tape.inputs)
    return PyObject_Vectorcall(tape.function, given, count, nullptr);
  Values values(tape, given);
  for (const Instruction& one : tape.instructions) {
    PyObject* found = nullptr;
    if (is_plain && one.op) found = run_operator(one, values);
    if (is_plain && one.entry) found = run_entry(one, values);
    if (!found) {
      if (PyErr_Occurred()) return nullptr;
      found = run_function(one, values);
      if (!found) return nullptr;
      is_plain = is_plain_now();  // a function may enter modes
    }
    if (one.results.size() == 1) {
      values.at[one.results[0]] = found;
    } else {
      const Reference all(found);
      for (size_t i = 0; i < one.results.size(); ++i)
        values.at[one.results[i]] = Py_NewRef(PyTuple_GET_ITEM(found, static_cast<Py_ssize_t>(i)));
    }
    for (const int slot : one.released) values.release(slot);
  }
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(tape.outputs.size()));
  for (size_t i = 0; result && i < tape.outputs.size(); ++i)
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(i), Py_NewRef(values[tape.outputs[i]]));
  return result;
  END_HANDLE_TH_ERRORS
}

PyMethodDef run_definition = {
    "tape", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_tape)), METH_FASTCALL,
    "Runs a captured graph."};

std::vector<int> slots_of(PyObject* list) {
  return pybind11::reinterpret_borrow<pybind11::object>(list).cast<std::vector<int>>();
}

// An operand as compile.tape writes it: slot, [slots] or (constant,). Of a mask: (slot, None) is
// its tensor, (slot, None, is_causal) is true if it is causal.
Operand read_operand(PyObject* given) {
  if (PyList_Check(given)) return {Operand::kList, -1, nullptr, slots_of(given)};
  if (!PyTuple_Check(given))
    return {Operand::kSlot, static_cast<int>(PyLong_AsLong(given)), nullptr, {}};
  const Py_ssize_t size = PyTuple_GET_SIZE(given);
  PyObject* last = Py_NewRef(PyTuple_GET_ITEM(given, size - 1));
  if (size == 1) return {Operand::kConstant, -1, last, {}};
  const int slot = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(given, 0)));
  return {size == 2 ? Operand::kMask : Operand::kCausal, slot, last, {}};
}

const Operator* find_operator(PyObject* name) {
  for (const Operator& each : kOperators)
    if (PyUnicode_CompareWithASCIIString(name, each.name) == 0) return &each;
  TORCH_CHECK(false, "a tape has no such operator");
}

}  // namespace

// Arguments: the graph as a function of Python, the number of its inputs, a list of constants, the
// number of slots, a list of instructions, and the slots of the outputs. An instruction: (the name
// of an operator, an entry or None; its operands; a function of the entry's items or None; a Python
// function of the same results; the slots of its arguments; the slots of the results; the slots to
// release).
PyObject* make_tape(PyObject*, Arguments given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto tape = std::make_unique<Tape>();
  tape->function = Py_NewRef(given[0]);
  tape->inputs = static_cast<int>(PyLong_AsLong(given[1]));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[2]); ++i)
    tape->constants.push_back(Py_NewRef(PyList_GET_ITEM(given[2], i)));
  tape->slots = static_cast<int>(PyLong_AsLong(given[3]));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[4]); ++i) {
    PyObject *native, *operands, *finish, *function, *inputs, *results, *released;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(given[4], i), "OO!OOOOO", &native, &PyList_Type,
                          &operands, &finish, &function, &inputs, &results, &released))
      return nullptr;
    Instruction& one = tape->instructions.emplace_back();
    one.function = Py_NewRef(function);
    if (PyUnicode_Check(native))
      one.op = find_operator(native);
    else if (native != Py_None)
      one.entry = Py_NewRef(native);
    if (finish != Py_None) one.finish = Py_NewRef(finish);
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(operands); ++j)
      one.operands.push_back(read_operand(PyList_GET_ITEM(operands, j)));
    one.inputs = slots_of(inputs);
    one.results = slots_of(results);
    one.released = slots_of(released);
  }
  tape->outputs = slots_of(given[5]);
  const Reference capsule(PyCapsule_New(tape.release(), nullptr, [](PyObject* object) {
    delete static_cast<Tape*>(PyCapsule_GetPointer(object, nullptr));
  }));
  return capsule.object ? PyCFunction_New(&run_definition, capsule.object) : nullptr;
  END_HANDLE_TH_ERRORS
}

}  // namespace tf::autograd
