// Pointwise and row-wise kernels.
#pragma once

#include <cstdint>

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

// Index of the largest element of each row, the first among equals; NaN counts as the largest.
struct ArgmaxArgs {
  Element type;  // float32, bfloat16 or float16
  const void* x;
  Index columns, stride;  // columns > 0; row stride in elements
  int64_t* place;
};
TF_KERNEL(void argmax_rows(const ArgmaxArgs& args, Index begin, Index end))

// Dropout by itself, for compositions of several operators.
struct DropoutArgs {
  Element type;   // of x and y
  const void* x;  // (rows, n), contiguous
  void* y;        // likewise; may be x
  Index n;
  Dropout dropout;
};

// Floats of scratch for dropout_rows.
TF_KERNEL(Index dropout_scratch(const DropoutArgs& args))

TF_KERNEL(void dropout_rows(const DropoutArgs& args, Index begin, Index end, float* scratch))

// Rotary position embeddings, in place: x cos + rotate_half(x) sin in the first `rotated` channels
// of each head, with rotate_half((a, b)) = (-b, a) for the two halves of these channels.
struct RotationArgs {
  Element type = {};        // of x
  Element table_type = {};  // of cos and sin: the same, or float32
  void* x = nullptr;        // rows x_stride apart, each with `heads` heads of `size` channels
  Index x_stride = 0, heads = 0, size = 0, rotated = 0;
  const void *cos = nullptr, *sin = nullptr;  // (positions, rotated), contiguous
  Index positions = 0;                        // row i is at position i % positions
};
TF_KERNEL(void rotate_rows(const RotationArgs& args, Index begin, Index end))

}  // namespace tf
