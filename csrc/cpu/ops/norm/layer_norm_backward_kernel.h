// Gradients of LayerNorm with the residual connection and the dropout before it.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

// y = (s - mean) * rstd * weight + bias, s = residual + dropout(input).
struct LayerNormBackwardArgs {
  Element type;          // of grad, grad_sum, source, grad_source and grad_input
  const void* grad;      // (rows, n): of y, rows grad_stride apart
  const void* grad_sum;  // (rows, n): of s where it is a result too, or nullptr
  const void* source;    // (rows, n): s
  const float* weight;   // (n) or nullptr: ones
  const float* mean;     // (rows)
  const float* rstd;     // (rows)
  void* grad_source;     // (rows, n), contiguous, or nullptr: not wanted
  void* grad_input;      // (rows, n), contiguous, behind the dropout, or nullptr
  float* partial;        // (blocks, 2, n): each block's share of dweight and dbias, or nullptr
  long rows, blocks, n, grad_stride, grad_sum_stride, source_stride;
  // Rows of the tensor whose elements are dropped; n is a multiple of it.
  long dropout_columns;
  Dropout dropout;
  bool annotated = false;  // rstd is 1 / (unbiased std + eps)
};

// Floats of scratch layer_norm_backward_block needs.
TF_KERNEL(long layer_norm_backward_scratch(const LayerNormBackwardArgs& args))

// Rows [rows * block / blocks, rows * (block + 1) / blocks).
TF_KERNEL(void layer_norm_backward_block(const LayerNormBackwardArgs& args, long block,
                                         float* scratch))

// Adds up columns [begin, end) of the shares: `which` 0 for dweight, 1 for dbias.
TF_KERNEL(void layer_norm_backward_sum(const LayerNormBackwardArgs& args, int which, float* total,
                                       long begin, long end))

}  // namespace tf
