// activation(x W^T + bias) + residual for bfloat16 and float16 with fp32 sums, rounded once.
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/linear/linear_typed.h"

namespace tf {

// Columns of a weight panel; bytes of a packed (n, k) matrix; and a number that tells layouts
// apart.
TF_KERNEL_AMX(long half_panel_columns())
TF_KERNEL_AMX(long half_packed_bytes(Element type, long n, long k))
TF_KERNEL_AMX(long half_packed_layout(Element type))

// Packs panels [begin, end) of W (n, k), rows stride apart.
TF_KERNEL_AMX(void half_pack_panels(Element type, const void* weight, long stride, long n, long k,
                                    void* packed, long begin, long end))

// Rows that one call of half_linear_block should be given, at most.
TF_KERNEL_AMX(long half_linear_row_block(const TypedLinearArgs& args))

// Bytes of scratch half_linear_block needs.
TF_KERNEL_AMX(long half_linear_scratch(const TypedLinearArgs& args))

// Rows [row_begin, row_end) of the panels [panel_begin, panel_end).
TF_KERNEL_AMX(void half_linear_block(const TypedLinearArgs& args, long row_begin, long row_end,
                                     long panel_begin, long panel_end, void* scratch))

// The same of all rows, of which there are at most half_linear_row_block, from W itself: the rows
// are brought into the form that products read, and each panel is packed just before it is
// multiplied.
TF_KERNEL_AMX(long half_linear_packing_scratch(const TypedLinearArgs& args))
TF_KERNEL_AMX(void half_linear_fill(const TypedLinearArgs& args, void* scratch))
TF_KERNEL_AMX(void half_linear_packing(const TypedLinearArgs& args, long panel_begin,
                                       long panel_end, void* scratch))

// Panels [panel_begin, panel_end) of y from W as it is, not turned: for 1 to kMostDirectRows rows.
constexpr long kMostDirectRows = 12;
TF_KERNEL_AMX(void half_linear_direct(const TypedLinearArgs& args, long panel_begin,
                                      long panel_end))

}  // namespace tf
