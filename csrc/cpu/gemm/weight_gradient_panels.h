// Where the right factor of a weight gradient lies; for kernel files only.
#pragma once

#include "cpu/gemm/gemm.h"

namespace tf::TF_ISA {
namespace {

// Floats from one panel of m rows to the next; the odd ones keep panels out of each other's cache
// sets.
TF_INLINE long weight_gradient_panel_stride(long m) { return m * kPanel + 16; }

// Where `column` (a multiple of kLanes) of a row is.
TF_INLINE long weight_gradient_place(long m, long row, long column) {
  return column / kPanel * weight_gradient_panel_stride(m) + row * kPanel + column % kPanel;
}

}  // namespace
}  // namespace tf::TF_ISA
