// The operators of linear layers and of the feed-forward network: PyTorch's matrix products
// (cuBLAS; on the CPU, in tests, PyTorch's own), each followed by one kernel.
#include <array>
#include <tuple>

#include "cuda/epilogue.cuh"
#include "cuda/operators.h"

namespace tf::cuda {
namespace {

using MaybeTensor = std::optional<Tensor>;

int64_t last_size(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }

// Reshapes (..., columns) to (rows, columns); a copy only if no view is possible.
Tensor as_matrix(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows *= tensor.size(d);
  if (tensor.dim() == 2) return tensor;
  const std::array<int64_t, 2> sizes{rows, last_size(tensor)};
  return torch::stable::reshape(tensor, {sizes.data(), sizes.size()});
}

Tensor transposed(const Tensor& matrix) { return torch::stable::transpose(matrix, 0, 1); }

// Calls the `out` variant of an op, because autocast does not change those.
template <class... Arguments>
void call(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // a second reference to `out`
}

// Computes out = a b.
void multiply(const Tensor& a, const Tensor& b, const Tensor& out) {
  call("aten::mm", a, b, as_matrix(out));
}

Activation activation_of(const char* op, int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number <= 4, op, ": there is no activation ", number);
  return static_cast<Activation>(number);
}

std::vector<int64_t> with_last(const Tensor& tensor, int64_t columns) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  result.back() = columns;
  return result;
}

// Checks the arguments of a linear layer, and computes its product.
struct Map {
  const char* op;
  const char* weight_name;

  void check(const Tensor& input, const Tensor& weight, const MaybeTensor& bias) const {
    check_like(op, weight_name, weight, input);
    STD_TORCH_CHECK(input.dim() > 0 && weight.dim() == 2 && weight.size(1) == last_size(input), op,
                    ": ", weight_name, " must be a matrix with a column for each column of input");
    if (!bias) return;
    check_like(op, "bias", *bias, input);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                    ": bias must have an element for each row of ", weight_name);
  }

  // Returns input weight^T + bias.
  Tensor product(const Tensor& input, const Tensor& weight, const MaybeTensor& bias) const {
    check(input, weight, bias);
    Tensor result = empty(input, with_last(input, weight.size(0)));
    if (result.numel() > 0) call("aten::linear", as_matrix(input), weight, bias, as_matrix(result));
    return result;
  }
};

void check_z(const char* op, const Tensor& z, const Tensor& like, int64_t elements) {
  check_like(op, "preactivation", z, like);
  STD_TORCH_CHECK(z.is_contiguous() && z.numel() == elements, op,
                  ": preactivation must be a result of the forward");
}

// Computes dz = dropout(grad) activation'(z), hidden = dropout(activation(z)) and the column sums
// of dz; each only if its pointer is not null. `grad` is a matrix.
struct Gradient {
  const char* op;
  Activation activation;
  Dropout dropout;

  void operator()(const Tensor& grad, const Tensor* z, Tensor* grad_z, Tensor* hidden,
                  Tensor* grad_bias) const {
    const int64_t rows = grad.size(0), columns = grad.size(1);
    if (grad_z == nullptr && hidden == nullptr && grad_bias == nullptr) return;
    const OnDevice device(grad);
    const Rows dy = as_rows(grad, columns);
    const Element type = element_of(op, grad);
    const int64_t shares = epilogue_shares(type, rows, columns);
    MaybeTensor partial;
    if (grad_bias != nullptr)
      partial = empty(grad, {shares > 0 ? shares : 1, columns}, ScalarType::Float);
    const auto data = [](Tensor* t) { return t != nullptr ? t->mutable_data_ptr() : nullptr; };
    launch_epilogue_backward(
        {.type = type,
         .activation = activation,
         .grad = dy.data,
         .z = z != nullptr ? z->const_data_ptr() : nullptr,
         .grad_z = data(grad_z),
         .hidden = data(hidden),
         .grad_bias = data(grad_bias),
         .partial = partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr,
         .rows = rows,
         .columns = columns,
         .grad_stride = dy.stride,
         .shares = shares,
         .dropout = dropout},
        device.stream);
  }
};

void follow(const char* op, const Tensor& z, const MaybeTensor& residual, Tensor& output,
            Activation activation, const Dropout& dropout) {
  const int64_t columns = last_size(z);
  if (z.numel() == 0) return;
  const OnDevice device(z);
  const Rows other = residual ? as_rows(*residual, columns) : Rows{z, nullptr, 0};
  launch_epilogue({.type = element_of(op, z),
                   .activation = activation,
                   .z = z.const_data_ptr(),
                   .residual = other.data,
                   .output = output.mutable_data_ptr(),
                   .rows = z.numel() / columns,
                   .columns = columns,
                   .residual_stride = other.stride,
                   .dropout = dropout},
                  device.stream);
}

constexpr Dropout kNoDropout{false, nullptr, 0, 1.0f};

// Returns (output; preactivation, empty unless `keep`).
std::tuple<Tensor, Tensor> linear(Tensor input, Tensor weight, MaybeTensor bias,
                                  MaybeTensor residual, int64_t activation_number, bool keep) {
  constexpr const char* kOp = "linear";
  element_of(kOp, input);
  const Activation activation = activation_of(kOp, activation_number);
  Tensor z = Map{kOp, "weight"}.product(input, weight, bias);
  if (residual) {
    check_like(kOp, "residual", *residual, input);
    STD_TORCH_CHECK(residual->sizes().equals(z.sizes()), kOp,
                    ": residual must have the shape of the result");
  }
  STD_TORCH_CHECK(!keep || activation != Activation::identity, kOp,
                  ": without an activation there is no preactivation to keep");
  if (activation == Activation::identity && !residual) return {z, empty(input, {0})};
  Tensor output = keep ? empty_contiguous(z) : z;
  follow(kOp, z, residual, output, activation, kNoDropout);
  return {output, keep ? z : empty(input, {0})};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor grad, Tensor input, Tensor weight,
                                                   MaybeTensor preactivation,
                                                   int64_t activation_number, bool want_input,
                                                   bool want_weight, bool want_bias) {
  constexpr const char* kOp = "linear";
  element_of(kOp, grad);
  const Activation activation = activation_of(kOp, activation_number);
  STD_TORCH_CHECK(grad.dim() > 0 && weight.dim() == 2 && last_size(grad) == weight.size(0), kOp,
                  ": grad must have a column for each row of weight");
  check_like(kOp, "weight", weight, grad);
  check_like(kOp, "input", input, grad);
  const Tensor dy = as_matrix(grad);
  const bool linear_map = activation == Activation::identity;
  if (!linear_map) {
    STD_TORCH_CHECK(preactivation, kOp, ": the backward of an activation needs preactivation");
    check_z(kOp, *preactivation, grad, grad.numel());
  }
  Tensor grad_input = want_input ? empty_contiguous(input) : empty(input, {0});
  Tensor grad_weight = want_weight ? empty_contiguous(weight) : empty(weight, {0});
  Tensor grad_bias = empty(weight, {want_bias ? weight.size(0) : 0});
  const bool through = want_input || want_weight;
  Tensor grad_z = linear_map || !through ? dy : empty_contiguous(dy);
  Gradient{kOp, activation, kNoDropout}(dy, linear_map ? nullptr : &*preactivation,
                                        linear_map || !through ? nullptr : &grad_z, nullptr,
                                        want_bias ? &grad_bias : nullptr);
  if (want_input) multiply(grad_z, weight, grad_input);
  if (want_weight) multiply(transposed(grad_z), as_matrix(input), grad_weight);
  return {grad_input, grad_weight, grad_bias};
}

// Returns (output; a tensor saved for backward, empty unless `keep`). The latter is the hidden
// units for relu, which determine its derivative, and the preactivation for other activations.
std::tuple<Tensor, Tensor> feed_forward(Tensor input, Tensor weight1, MaybeTensor bias1,
                                        Tensor weight2, MaybeTensor bias2,
                                        int64_t activation_number, double dropout_p,
                                        MaybeTensor seed, bool keep) {
  constexpr const char* kOp = "feed_forward";
  element_of(kOp, input);
  const Activation activation = activation_of(kOp, activation_number);
  const Dropout dropout = make_dropout(kOp, dropout_p, seed, input);
  Tensor z = Map{kOp, "weight1"}.product(input, weight1, bias1);
  Tensor hidden = keep && activation != Activation::relu ? empty_contiguous(z) : z;
  follow(kOp, z, std::nullopt, hidden, activation, dropout);
  return {Map{kOp, "weight2"}.product(hidden, weight2, bias2), keep ? z : empty(input, {0})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> feed_forward_backward(
    Tensor grad, Tensor input, Tensor weight1, Tensor weight2, Tensor saved,
    int64_t activation_number, double dropout_p, MaybeTensor seed, bool want_input,
    bool want_weight1, bool want_bias1, bool want_weight2, bool want_bias2) {
  constexpr const char* kOp = "feed_forward";
  element_of(kOp, grad);
  const Activation activation = activation_of(kOp, activation_number);
  const Dropout dropout = make_dropout(kOp, dropout_p, seed, grad);
  STD_TORCH_CHECK(grad.dim() > 0 && weight2.dim() == 2 && last_size(grad) == weight2.size(0), kOp,
                  ": grad must have a column for each row of weight2");
  check_like(kOp, "input", input, grad);
  check_like(kOp, "weight1", weight1, grad);
  check_like(kOp, "weight2", weight2, grad);
  const Tensor dy = as_matrix(grad);
  const int64_t units = weight2.size(1);
  check_z(kOp, saved, grad, dy.size(0) * units);
  const auto gradient_of = [](bool wanted, const Tensor& tensor) {
    return wanted ? empty_contiguous(tensor) : empty(tensor, {0});
  };
  Tensor grad_input = gradient_of(want_input, input);
  Tensor grad_weight1 = gradient_of(want_weight1, weight1);
  Tensor grad_weight2 = gradient_of(want_weight2, weight2);
  Tensor grad_bias1 = empty(weight1, {want_bias1 ? units : 0});
  Tensor grad_bias2 = empty(weight2, {want_bias2 ? weight2.size(0) : 0});
  const bool remake = want_weight2 && activation != Activation::relu;
  Tensor hidden = remake ? empty(grad, {dy.size(0), units}) : as_matrix(saved);
  if (want_input || want_weight1 || want_bias1) {
    Tensor grad_z = empty(grad, {dy.size(0), units});
    multiply(dy, weight2, grad_z);
    // In place, because each thread reads an element before it writes it.
    Gradient{kOp, activation, dropout}(grad_z, &saved, &grad_z, remake ? &hidden : nullptr,
                                       want_bias1 ? &grad_bias1 : nullptr);
    if (want_input) multiply(grad_z, weight1, grad_input);
    if (want_weight1) multiply(transposed(grad_z), as_matrix(input), grad_weight1);
  } else if (remake) {
    follow(kOp, saved, std::nullopt, hidden, activation, dropout);
  }
  if (want_weight2) multiply(transposed(dy), hidden, grad_weight2);
  Gradient{kOp, Activation::identity, kNoDropout}(dy, nullptr, nullptr, nullptr,
                                                  want_bias2 ? &grad_bias2 : nullptr);
  return {grad_input, grad_weight1, grad_bias1, grad_weight2, grad_bias2};
}

}  // namespace
}  // namespace tf::cuda

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, TF_DISPATCH_KEY, m) {
  m.impl("linear_training.cuda", TORCH_BOX(&tf::cuda::linear));
  m.impl("linear_backward.cuda", TORCH_BOX(&tf::cuda::linear_backward));
  m.impl("feed_forward_training.cuda", TORCH_BOX(&tf::cuda::feed_forward));
  m.impl("feed_forward_backward.cuda", TORCH_BOX(&tf::cuda::feed_forward_backward));
}
