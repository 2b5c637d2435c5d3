// activation(x W^T + bias) + residual for bfloat16 and float16 with fp32 sums, rounded once.
#pragma once

#include "cpu/element.h"
#include "cpu/isa.h"

namespace tf {

struct HalfLinearArgs {
  Element type;          // of all tensors here: bfloat16 or float16
  const void* x;         // (m, k), rows x_stride apart
  const void* packed;    // W (n, k) in panels, see half_packed_bytes()
  const void* bias;      // (n) or nullptr: zeros
  const void* residual;  // (m, n), rows residual_stride apart, or nullptr
  void* y;               // (m, n), rows y_stride apart
  long m, k, n, x_stride, residual_stride, y_stride;
  int activation;
};

// Columns of a weight panel; bytes of a packed (n, k) matrix; and a number that tells layouts
// apart.
TF_KERNEL_AMX(long half_panel_columns())
TF_KERNEL_AMX(long half_packed_bytes(Element type, long n, long k))
TF_KERNEL_AMX(long half_packed_layout(Element type))

// Packs panels [begin, end) of W (n, k), rows stride apart.
TF_KERNEL_AMX(void half_pack_panels(Element type, const void* weight, long stride, long n, long k,
                                    void* packed, long begin, long end))

// Whether `packed` still holds W, judged by some values of it.
TF_KERNEL_AMX(bool half_packed_matches(Element type, const void* weight, long stride, long n,
                                       long k, const void* packed))

// Rows that one call of half_linear_block should be given, at most.
TF_KERNEL_AMX(long half_linear_row_block(const HalfLinearArgs& args))

// Bytes of scratch half_linear_block needs.
TF_KERNEL_AMX(long half_linear_scratch(const HalfLinearArgs& args))

// Rows [row_begin, row_end) of the panels [panel_begin, panel_end).
TF_KERNEL_AMX(void half_linear_block(const HalfLinearArgs& args, long row_begin, long row_end,
                                     long panel_begin, long panel_end, void* scratch))

}  // namespace tf
