// Base class of the autograd nodes.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <memory>
#include <type_traits>

#include "autograd/entry.h"

namespace tf::autograd {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// A node with `inputs` inputs, which are its edges, and `saved` tensors. Saved tensors are checked
// for changes in place, seen by saved-tensor hooks, and released after a backward.
template <int inputs, int saved>
struct Backward : torch::autograd::Node {
  const Op* op;
  std::array<SavedVariable, saved> tensors;
  std::array<bool, saved> is_output{};
  bool released = false;

  std::string name() const override { return std::string(op->name) + "_backward"; }

  void save(int place, const Tensor& tensor, bool output = false) {
    tensors[place] = SavedVariable(tensor, output);
    is_output[place] = output;
  }
  void save(int place, const Tensor* tensor, bool wanted = true) {
    if (tensor && wanted) save(place, *tensor);
  }
  Tensor saved_tensor(int place) {
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    return is_output[place] ? tensors[place].unpack(this->getptr()) : tensors[place].unpack();
  }
  void release_variables() override {
    for (SavedVariable& each : tensors) each.reset_data();
    released = true;
  }

  // Whether autograd needs the gradient of this input: `autograd.grad` may leave some out.
  bool wants(int input) const {
    return this->next_edge(input).is_valid() && this->task_should_compute_output(input);
  }

  // True if the gradient's memory suffices, and nothing observes operators or differentiates again.
  // Autocast does not matter: gradients have the dtypes of the forward.
  static bool is_plain(std::initializer_list<const Tensor*> gradients) {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    if (at::GradMode::is_enabled() || keys.included_ != c10::default_included_set) return false;
    if ((keys.excluded_ | c10::default_excluded_set) != c10::default_excluded_set) return false;
    for (const Tensor* each : gradients)
      if (each->defined() && (!has_plain_keys(*each) || each->_fw_grad(0).defined())) return false;
    return true;
  }

  // The gradients by the formula of the reference, which can be differentiated again:
  // formula(*arguments, wants) returns a gradient or None for each input.
  variable_list by_formula(std::initializer_list<Tensor> given,
                           std::initializer_list<double> numbers) {
    pybind11::gil_scoped_acquire gil;
    const auto count = static_cast<Py_ssize_t>(given.size() + numbers.size());
    const Reference arguments(PyTuple_New(count + 1)), wanted(PyTuple_New(inputs));
    Py_ssize_t place = 0;
    for (const Tensor& each : given)
      PyTuple_SET_ITEM(arguments.object, place++, THPVariable_Wrap(each));
    for (const double each : numbers)
      PyTuple_SET_ITEM(arguments.object, place++, PyFloat_FromDouble(each));
    for (int i = 0; i < inputs; ++i) PyTuple_SET_ITEM(wanted.object, i, PyBool_FromLong(wants(i)));
    PyTuple_SET_ITEM(arguments.object, place, Py_NewRef(wanted.object));
    const Reference found(PyObject_CallObject(op->formula, arguments.object));
    if (!found.object) raise_python_error();
    const Reference list(PySequence_Tuple(found.object));
    if (!list.object) raise_python_error();
    variable_list result(inputs);
    for (int i = 0; i < inputs; ++i) {
      PyObject* each = PyTuple_GET_ITEM(list.object, i);
      if (each != Py_None) result[i] = THPVariable_Unpack(each);
    }
    return result;
  }
};

// A node; its class is counted by intrusive_ptr from PyTorch 2.13 on, by shared_ptr before.
template <class Node, class... Inputs>
auto make_node(const Op& op, const Inputs&... inputs) {
  const auto finish = [&](auto node) {
    node->op = &op;
    node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
    return node;
  };
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>)
    return finish(c10::make_intrusive<Node>());
  else
    return finish(std::shared_ptr<Node>(new Node, [](auto* node) { deleteNode(node); }));
}

}  // namespace tf::autograd
