// Gradients of a linear map y = act(x W^T + b): what its products need besides those of the
// forward.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

// Packs panels [begin, end) of the columns of W (n, k), rows stride apart: panel p holds
// W[:, p * panel_columns() ...] as (n, panel_columns()), filled up with zeros. As `packed` of
// LinearArgs it multiplies by W instead of W^T.
TF_KERNEL(void pack_column_panels(const float* weight, long stride, long n, long k, float* packed,
                                  long begin, long end))

// Floats of that packing.
TF_KERNEL(long column_packed_size(long n, long k))

// to[j] = grad[j] * act'(z[j]) for rows [begin, end) of n columns.
struct SlopeArgs {
  Element type;
  const void* grad;  // (m, n), rows grad_stride apart
  const void* z;     // (m, n), contiguous: what the activation was applied to
  void* to;          // (m, n), contiguous
  long n, grad_stride;
  int activation;
};
TF_KERNEL(void multiply_by_slope(const SlopeArgs& args, long begin, long end))

// dW = dY^T X and db = sum over rows of dY, with X = dropout(act(x)).
struct WeightGradientArgs {
  const float* grad;   // dY (m, n), rows grad_stride apart
  const float* x;      // (m, k), rows x_stride apart
  float* panels;       // X in panels of its columns, see weight_gradient_panels()
  float* grad_weight;  // (n, k), contiguous, or nullptr: not wanted
  float* grad_bias;    // (n) or nullptr
  long m, n, k, grad_stride, x_stride;
  long row;         // of the first row among those that dropout counts
  bool accumulate;  // add to what grad_weight and grad_bias hold
  int activation;
  Dropout dropout;
  const void* pieces;  // X as split_weight_gradient_x() leaves it, for split_weight_gradient()
};

// Floats that `panels` takes for m rows.
TF_KERNEL(long weight_gradient_panels(long m, long k))

// Computes rows [begin, end) of X and puts them into the panels.
TF_KERNEL(void pack_x(const WeightGradientArgs& args, long begin, long end, float* scratch))

// Rows and columns of dW that one call of weight_gradient_block should be given, at most.
TF_KERNEL(long weight_gradient_rows())
TF_KERNEL(long weight_gradient_columns())

// Floats of scratch that pack_x and weight_gradient_block need.
TF_KERNEL(long weight_gradient_scratch(const WeightGradientArgs& args))

// Elements [begin, end) of db.
TF_KERNEL(void bias_gradient(const WeightGradientArgs& args, long begin, long end))

// Rows [row_begin, row_end) and columns [column_begin, column_end) of dW; column_begin is a
// multiple of panel_columns().
TF_KERNEL(void weight_gradient_block(const WeightGradientArgs& args, long row_begin, long row_end,
                                     long column_begin, long column_end, float* scratch))

}  // namespace tf
