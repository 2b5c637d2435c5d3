// LayerNorm with the residual connection before it; rows [begin, end) of one call.
#pragma once

#include "cpu/isa.h"

namespace tf {

// y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, s = x + residual.
struct LayerNormArgs {
  const float* x;         // (rows, n), rows x_stride apart
  const float* residual;  // (rows, n) or nullptr
  const float* weight;    // (n) or nullptr: ones
  const float* bias;      // (n) or nullptr: zeros
  float* y;               // (rows, n), contiguous
  float* sum;             // (rows, n), contiguous, or nullptr without residual
  float* mean;            // (rows)
  float* rstd;            // (rows)
  long n, x_stride, residual_stride;
  float eps;
};

TF_KERNEL(void layer_norm_rows(const LayerNormArgs& args, long begin, long end))

}  // namespace tf
