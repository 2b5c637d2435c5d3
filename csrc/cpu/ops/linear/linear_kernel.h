// activation(x W^T + bias) + residual on packed weights.
#pragma once

#include "cpu/core/isa.h"

namespace tf {

struct LinearArgs {
  const float* x;         // (m, k), rows x_stride apart
  const float* packed;    // W (n, k) in panels, see packed_size()
  const float* bias;      // (n) or nullptr: zeros
  const float* residual;  // (m, n), rows residual_stride apart, or nullptr
  float* y;               // (m, n), rows y_stride apart
  long m, k, n, x_stride, residual_stride, y_stride;
  int activation;
  float* preactivation = nullptr;  // (m, n), contiguous: x W^T + bias is kept here, or nullptr
  // In place of packed, for linear_direct and linear_packing: W itself, rows weight_stride apart.
  const float* weight = nullptr;
  long weight_stride = 0;
};

// Columns of a weight panel, and floats that a packed (n, k) matrix takes.
TF_KERNEL(long panel_columns())
TF_KERNEL(long packed_size(long n, long k))

// Packs panels [begin, end) of W (n, k), rows stride apart.
TF_KERNEL(void pack_panels(const float* weight, long stride, long n, long k, float* packed,
                           long begin, long end))

// Floats of scratch linear_block needs.
TF_KERNEL(long linear_scratch(const LinearArgs& args))

// Rows [row_begin, row_end) of the panels [panel_begin, panel_end).
TF_KERNEL(void linear_block(const LinearArgs& args, long row_begin, long row_end, long panel_begin,
                            long panel_end, float* scratch))

// The same in two steps for calls of few rows, if linear_is_one_block: all rows are brought into
// the form that products read, in scratch, and then panels [panel_begin, panel_end) pass by, as
// often as wanted.
TF_KERNEL(bool linear_is_one_block(const LinearArgs& args))
TF_KERNEL(void linear_turn(const LinearArgs& args, float* scratch))
TF_KERNEL(void linear_panels(const LinearArgs& args, long panel_begin, long panel_end,
                             float* scratch))

// linear_panels with a weight that is not packed: each panel is packed, part by part, into scratch,
// of linear_packing_scratch floats, right before it is multiplied.
TF_KERNEL(long linear_packing_scratch(const LinearArgs& args))
TF_KERNEL(void linear_packing(const LinearArgs& args, long panel_begin, long panel_end,
                              float* scratch))

// Columns [begin, end) of y from W as it is: for so few rows that packing would not pay.
TF_KERNEL(void linear_direct(const LinearArgs& args, long begin, long end))

}  // namespace tf
