// LayerNorm with the residual connection before it; rows [begin, end) of one call.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

// y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, s = residual + dropout(x).
struct LayerNormArgs {
  const float* x;         // (rows, n), rows x_stride apart
  const float* residual;  // (rows, n) or nullptr
  const float* weight;    // (n) or nullptr: ones
  const float* bias;      // (n) or nullptr: zeros
  float* y;               // (rows, n), contiguous
  float* sum;             // (rows, n), contiguous, or nullptr without residual
  float* mean;            // (rows) or nullptr
  float* rstd;            // (rows) or nullptr
  long n, x_stride, residual_stride;
  float eps;
  // Rows of the tensor whose elements are dropped; n is a multiple of it.
  long dropout_columns;
  Dropout dropout;
  // Divide by std + eps, std the unbiased one, as The Annotated Transformer does.
  bool annotated = false;
};

// Floats of scratch layer_norm_rows needs.
TF_KERNEL(long layer_norm_scratch(const LayerNormArgs& args))

TF_KERNEL(void layer_norm_rows(const LayerNormArgs& args, long begin, long end, float* scratch))

}  // namespace tf
