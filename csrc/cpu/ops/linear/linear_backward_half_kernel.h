// Gradients of a linear map of half types, y = act(x W^T + b): what its products need besides those
// of the forward. Sums are in fp32 and rounded once.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"

namespace tf {

// A matrix (m, k), rows stride apart, in panels of its columns, half_packed_bytes(type, k, m) long:
// X for its weight's gradient; W, which as `packed` of TypedLinearArgs multiplies by W instead of
// W^T. Packs blocks [begin, end) of half_pack_rows() rows.
TF_KERNEL_AMX(long half_pack_rows())
TF_KERNEL_AMX(void half_pack_columns(Element type, const void* matrix, long stride, long m, long k,
                                     void* panels, long begin, long end))

// Some rows' part of dW = dY^T X and db = sum over rows of dY.
struct HalfWeightGradientArgs {
  Element type;
  const void* grad;    // dY (m, n), rows grad_stride apart
  const void* panels;  // X (m, k) in panels of its columns
  void* grad_weight;   // (n, k), contiguous, or nullptr: not wanted
  void* grad_bias;     // (n) or nullptr
  float* sums;         // (n, k) of the rows so far, where those are not all; else nullptr
  float* bias_sums;    // (n)
  long m, n, k, grad_stride;
  bool first, last;  // no rows went before, none come after
};

// Rows and columns of dW that one call of half_weight_gradient should be given, at most.
TF_KERNEL_AMX(long half_weight_gradient_rows())
TF_KERNEL_AMX(long half_weight_gradient_columns())

// Bytes of scratch that it needs.
TF_KERNEL_AMX(long half_weight_gradient_scratch(Element type))

// Rows [row_begin, row_end) and columns [column_begin, column_end) of dW; column_begin is a
// multiple of half_panel_columns().
TF_KERNEL_AMX(void half_weight_gradient(const HalfWeightGradientArgs& args, long row_begin,
                                        long row_end, long column_begin, long column_end,
                                        void* scratch))

// Elements [begin, end) of db.
TF_KERNEL_AMX(void half_bias_gradient(const HalfWeightGradientArgs& args, long begin, long end))

}  // namespace tf
