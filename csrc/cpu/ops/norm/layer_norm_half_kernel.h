// LayerNorm with the residual connection before it for bfloat16 and float16, statistics in fp32.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

// y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, s = residual + dropout(x), rounded to the
// type: mean and rstd are those of the rounded sums, which the backward sees.
struct HalfLayerNormArgs {
  Element type;          // of x, residual, y and sum: bfloat16 or float16
  Element weight_type;   // of weight and bias: the same, or float32
  const void* x;         // (rows, n), rows x_stride apart
  const void* residual;  // (rows, n) or nullptr
  const void* weight;    // (n) or nullptr: ones
  const void* bias;      // (n) or nullptr: zeros
  void* y;               // (rows, n), contiguous
  void* sum;             // (rows, n), contiguous, or nullptr without residual
  float* mean;           // (rows)
  float* rstd;           // (rows)
  long n, x_stride, residual_stride;
  float eps;
  // Rows of the tensor whose elements are dropped; n is a multiple of it.
  long dropout_columns;
  Dropout dropout;
};

// Bytes of scratch half_layer_norm_rows needs.
TF_KERNEL_AMX(long half_layer_norm_scratch(const HalfLayerNormArgs& args))

TF_KERNEL_AMX(void half_layer_norm_rows(const HalfLayerNormArgs& args, long begin, long end,
                                        void* scratch))

}  // namespace tf
