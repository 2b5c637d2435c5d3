// LayerNorm, RMSNorm and the norms of The Annotated Transformer, with the preceding residual
// connection and dropout, forward and backward.
#pragma once

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

// The kind of norm: what is subtracted, c, and divided by, 1 / r. The codes are part of the
// operators' schemas.
enum class NormKind : Index {
  layer = 0,             // c = mean(s), 1 / r = sqrt(var(s) + eps); Ba et al. 2016
  rms = 1,               // c = 0, 1 / r = sqrt(mean(s^2) + eps); Zhang and Sennrich 2019
  annotated = 2,         // c = mean(s), 1 / r = std(s) + eps, unbiased; The Annotated Transformer
  annotated_biased = 3,  // the same with the biased std
};
constexpr Index kNormKinds = 4;

// Kernels use these predicates instead of kinds. Inlined, so that each gets its kernel's
// instruction set.
__attribute__((always_inline)) inline bool subtracts_mean(NormKind kind) {
  return kind != NormKind::rms;
}
__attribute__((always_inline)) inline bool eps_is_under_root(NormKind kind) {
  return kind == NormKind::layer || kind == NormKind::rms;
}
// Returns the divisor of the sum of n squares.
__attribute__((always_inline)) inline Index terms_of(NormKind kind, Index n) {
  return kind == NormKind::annotated ? n - 1 : n;
}

// y = (s - c) r * weight + bias, s = residual + dropout(x) rounded to the element type: c and r are
// those of the rounded sums, which the backward uses.
struct LayerNormArgs {
  Element type;                    // of x, residual, y and sum
  Element weight_type;             // of weight and bias: the same, or float32
  const void* x;                   // (rows, n), rows x_stride apart
  const void* residual = nullptr;  // (rows, n) or nullptr
  const void* weight;              // (n) or nullptr: ones
  const void* bias;                // (n) or nullptr: zeros
  void* y;                         // (rows, n), contiguous
  void* sum = nullptr;             // (rows, n), contiguous, or nullptr without residual
  float* mean = nullptr;           // (rows) or nullptr: c
  float* rstd = nullptr;           // (rows) or nullptr: r
  Index n, x_stride, residual_stride = 0;
  float eps;
  // Size of the last dimension, in which dropout counts rows; n is a multiple of it.
  Index dropout_columns;
  Dropout dropout = {};
  NormKind kind = NormKind::layer;
};

// Rows [0, rows) on torch's threads.
void run_layer_norm(const LayerNormArgs& args, Index rows);
// Rows [begin, end) on this thread.
void run_layer_norm_rows(const LayerNormArgs& args, Index begin, Index end);

// Bytes of scratch for layer_norm_rows: float32; bfloat16 and float16.
TF_KERNEL(Index layer_norm_scratch(const LayerNormArgs& args))
TF_KERNEL_AMX(Index lowp_layer_norm_scratch(const LayerNormArgs& args))

TF_KERNEL(void layer_norm_rows(const LayerNormArgs& args, Index begin, Index end, void* scratch))
TF_KERNEL_AMX(void lowp_layer_norm_rows(const LayerNormArgs& args, Index begin, Index end,
                                        void* scratch))

// Backward of the same y.
struct LayerNormBackwardArgs {
  Element type;          // of grad, grad_sum, source, grad_source and grad_input
  Element weight_type;   // of weight, dweight and dbias: the same, or float32
  const void* grad;      // (rows, n): of y, rows grad_stride apart
  const void* grad_sum;  // (rows, n): of s, if it is a result too, or nullptr
  const void* source;    // (rows, n): s
  const void* weight;    // (n) or nullptr: ones
  const float* mean;     // (rows): c
  const float* rstd;     // (rows): r
  void* grad_source;     // (rows, n), contiguous, or nullptr: not wanted
  void* grad_input;      // (rows, n), contiguous: of x, or nullptr
  float* partial;        // (blocks, 2, n): each block's share of dweight and dbias, or nullptr
  Index rows, blocks, n, grad_stride, grad_sum_stride, source_stride;
  // Size of the last dimension, in which dropout counts rows; n is a multiple of it.
  Index dropout_columns;
  Dropout dropout;
  NormKind kind = NormKind::layer;
};

// Floats of scratch for layer_norm_backward_block.
TF_KERNEL(Index layer_norm_backward_scratch(const LayerNormBackwardArgs& args))

// Rows [rows * block / blocks, rows * (block + 1) / blocks).
TF_KERNEL(void layer_norm_backward_block(const LayerNormBackwardArgs& args, Index block,
                                         float* scratch))

// Sums columns [begin, end) of the partial results: `which` 0 for dweight, 1 for dbias. `total` has
// elements of type args.weight_type.
TF_KERNEL(void layer_norm_backward_sum(const LayerNormBackwardArgs& args, int which, void* total,
                                       Index begin, Index end))

}  // namespace tf
