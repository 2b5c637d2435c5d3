// Gradients of linear maps of few rows, where packing the weights would take longer than the
// products: everything is read and written once, where it lies.
#pragma once

#include "cpu/ops/linear/linear_backward_kernel.h"

namespace tf {

// dX = dY W.
struct FewInputArgs {
  const float* grad;    // dY (m, n), rows grad_stride apart
  const float* weight;  // W (n, k), rows weight_stride apart
  float* grad_input;    // (m, k), contiguous
  long m, n, k, grad_stride, weight_stride;
};

// Columns of dX that one call should be given a multiple of.
TF_KERNEL(long few_columns())

// Columns [begin, end) of dX.
TF_KERNEL(void few_input_gradient(const FewInputArgs& args, long begin, long end))

// Rows [begin, end) of dW, from X as it is.
TF_KERNEL(void few_weight_gradient(const WeightGradientArgs& args, long begin, long end))

// Between the two maps of a feed-forward network.
struct FewMiddleArgs {
  const float* z;  // (m, f): what the activation was applied to
  float* grad;     // (m, f): the gradient of what meets W2; becomes that of z
  float* hidden;   // (m, f): what meets W2, dropout(act(z)); or nullptr
  long f;
  int activation;
  Dropout dropout;
};

// Rows [begin, end); scratch of f + 64 floats.
TF_KERNEL(void few_middle(const FewMiddleArgs& args, long begin, long end, float* scratch))

}  // namespace tf
