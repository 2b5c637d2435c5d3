// The autograd nodes, and the base class of their functions.
#pragma once

#include <ATen/LegacyBatchedTensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <type_traits>

#include "autograd/entry.h"

namespace tf::autograd {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Base class of the functions of nodes: run(Given) returns the gradients of `inputs` tensors from
// the gradients of the results and `saved` tensors; numbers() returns its other parameters. A
// function is independent of its node, since compiled autograd runs it without one.
template <int input_count, int saved_count>
struct Function {
  static constexpr int inputs = input_count, saved = saved_count;
  struct Given {
    variable_list grads;
    std::array<Tensor, saved> tensors;
    std::array<bool, inputs> wants;  // wanted gradients; `autograd.grad` may omit some
  };
  const Op* op;

  // True if the gradient's memory suffices, and nothing observes operators or differentiates again.
  // Autocast does not matter: gradients have the dtypes of the forward.
  static bool is_plain(const Given& given) {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    if (at::GradMode::is_enabled() || keys.included_ != c10::default_included_set) return false;
    const auto excluded = and_named(c10::default_excluded_set);
    if ((keys.excluded_ | excluded) != excluded) return false;
    for (const Tensor& each : given.grads)
      if (each.defined() && (!has_plain_keys(each) || each._fw_grad(0).defined())) return false;
    return true;
  }

  // The gradients by the formula of the reference, which can be differentiated again and traced:
  // formula(*arguments, wants) returns a gradient or None for each input.
  variable_list by_formula(const Given& given, std::initializer_list<Tensor> tensors,
                           at::ArrayRef<double> numbers) const {
    pybind11::gil_scoped_acquire gil;
    const auto count = static_cast<Py_ssize_t>(tensors.size() + numbers.size());
    const Reference arguments(PyTuple_New(count + 1)), wanted(PyTuple_New(inputs));
    Py_ssize_t place = 0;
    for (const Tensor& each : tensors)
      PyTuple_SET_ITEM(arguments.object, place++, THPVariable_Wrap(each));
    for (const double each : numbers)
      PyTuple_SET_ITEM(arguments.object, place++, PyFloat_FromDouble(each));
    for (int i = 0; i < inputs; ++i)
      PyTuple_SET_ITEM(wanted.object, i, PyBool_FromLong(given.wants[i]));
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

// The node of a function. Its edges are the inputs. Saved tensors are checked for changes in place,
// passed to saved-tensor hooks, and released after a backward.
template <class F>
struct Backward final : torch::autograd::Node, F {
  std::array<SavedVariable, F::saved> tensors;
  std::array<bool, F::saved> is_output{};
  bool released = false;

  std::string name() const override { return std::string(this->op->name) + "_backward"; }

  void save(int place, const Tensor& tensor, bool output = false) {
    tensors[place] = SavedVariable(tensor, output);
    is_output[place] = output;
  }
  void save(int place, const Tensor* tensor, bool wanted = true) {
    if (tensor && wanted) save(place, *tensor);
  }
  void release_variables() override {
    for (SavedVariable& each : tensors) each.reset_data();
    released = true;
  }

  variable_list apply(variable_list&& grads) override {
    if (!has_gradients(grads)) return variable_list(F::inputs);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    typename F::Given given{std::move(grads), {}, wants()};
    for (int i = 0; i < F::saved; ++i)
      given.tensors[i] = is_output[i] ? tensors[i].unpack(this->getptr()) : tensors[i].unpack();
    const auto batched = std::find_if(given.grads.begin(), given.grads.end(), at::isBatchedTensor);
    return batched == given.grads.end() ? F::run(given) : one_by_one(given, *batched);
  }

  // Compiled autograd: tensors are arguments of the graph, which is specialised on all else.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    args.collect(std::string(this->op->name));
    for (int i = 0; i < F::saved; ++i) args.collect(tensors[i], is_output[i]);
    for (const double each : F::numbers()) args.collect(each);
    for (const bool each : wants()) args.collect(each);
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    PackedArgs packed;
    for (SavedVariable& each : tensors) {
      saved.before(each);
      packed.pack(each.unpack());
    }
    const auto run = [function = F(*this), wants = wants()](
                         const variable_list& grads, const std::vector<c10::IValue>& arguments) {
      if (!has_gradients(grads)) return variable_list(F::inputs);
      typename F::Given given{grads, {}, wants};
      for (int i = 0; i < F::saved; ++i) given.tensors[i] = arguments[i].toTensor();
      return function.run(given);
    };
    const auto& compiler = getPyCompilerInterface();
    const std::string function = compiler->bind_function(
        saved.get_py_compiler(), typeid(F).name(), run,
        std::vector<at::TypePtr>(F::saved, at::TensorType::get()), /*is_custom_function=*/true);
    variable_list found = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, grads, packed.vec(),
        IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
            get_input_metadata(this->next_edges())));
    for (SavedVariable& each : tensors) saved.after(each);
    return found;
  }

 private:
  // For `torch.autograd.grad(is_grads_batched=True)`: computes the gradients vector by vector.
  // Neither kernels nor the formulas, which call autograd, accept PyTorch's batched tensors.
  variable_list one_by_one(const typename F::Given& given, const Tensor& batched) const {
    const auto* first = at::maybeGetBatchedImpl(batched);
    const at::BatchDimsRef dims = first->bdims();
    TORCH_CHECK(dims.size() == 1, name(), " supports one batch dimension of gradients, not ",
                dims.size());
    const int64_t level = dims[0].level(), count = first->value().size(dims[0].dim());
    std::array<std::vector<Tensor>, F::inputs> found;
    for (int64_t i = 0; i < count; ++i) {
      typename F::Given one = given;
      for (Tensor& each : one.grads)
        if (const auto* impl = each.defined() ? at::maybeGetBatchedImpl(each) : nullptr)
          each = impl->value().select(impl->bdims()[0].dim(), i);
      const variable_list results = F::run(one);
      for (int j = 0; j < F::inputs; ++j)
        if (results[j].defined()) found[j].push_back(results[j]);
    }
    variable_list all(F::inputs);
    for (int j = 0; j < F::inputs; ++j)
      if (!found[j].empty())
        all[j] = at::makeBatched(at::stack(found[j]), {at::BatchDim(level, /*dim=*/0)});
    return all;
  }
  static bool has_gradients(const variable_list& grads) {
    return std::any_of(grads.begin(), grads.end(), [](const Tensor& x) { return x.defined(); });
  }
  std::array<bool, F::inputs> wants() const {
    std::array<bool, F::inputs> found;
    for (int i = 0; i < F::inputs; ++i)
      found[i] = this->next_edge(i).is_valid() && this->task_should_compute_output(i);
    return found;
  }
};

// A node; its class is counted by intrusive_ptr from PyTorch 2.13 on, by shared_ptr before.
template <class F, class... Inputs>
auto make_node(const Op& op, const Inputs&... inputs) {
  using Node = Backward<F>;
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
