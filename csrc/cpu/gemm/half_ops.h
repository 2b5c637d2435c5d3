// The operators for bfloat16 and float16. They take what the
// operators of the same names take, or what these have checked (backward_calls.h), and are called
// by those.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "cpu/core/element.h"

namespace tf {

struct HalfFeedForwardArgs;
struct HalfWeightGradientArgs;

inline bool is_half(const torch::stable::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == torch::headeronly::ScalarType::BFloat16 ||
         type == torch::headeronly::ScalarType::Half;
}

inline Element element_of(const torch::stable::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::BFloat16:
      return Element::bfloat16;
    case torch::headeronly::ScalarType::Half:
      return Element::float16;
    default:
      return Element::float32;
  }
}

struct LinearGradients;
struct FeedForwardGradients;

namespace half {

using torch::stable::Tensor;

void linear_gradients(LinearGradients& call);
// A weight in panels of its columns, in shared scratch `slot`, so that run_linear() multiplies by W
// instead of W^T.
const void* column_panels_of(const Tensor& weight, int slot);
// Rows of args.grad with rows x of X (x_stride apart), whose panels go to shared scratch `slot`.
void run_weight_gradient(HalfWeightGradientArgs args, const void* x, int64_t x_stride, int slot);

void feed_forward_gradients(FeedForwardGradients& call);

// The parts without checks and allocation, for operators made of several. Parameters are
// contiguous; x and y are (rows, columns).
// The hidden units of a call of few rows lie in shared scratch kHiddenSlot.
constexpr int kHiddenSlot = 2;
// The weights are in the place of args' packed ones.
void run_feed_forward(HalfFeedForwardArgs args, const Tensor& weight1,
                      const std::optional<Tensor>& packed1, const Tensor& weight2,
                      const std::optional<Tensor>& packed2);

}  // namespace half
}  // namespace tf
