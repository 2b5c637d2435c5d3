// Linear layer with epilogue in fp32.
#include "cpu/ops/linear/linear_direct.h"

namespace tf::TF_ISA {
namespace {

// Rows of W^T packed at a time: few, since they are read far apart.
constexpr long kTransposedRows = 8;

constexpr LinearKernels kKernels{.in_fp32 = true,
                                 .layout = kPanel,
                                 .panel = kPanel,
                                 .row_unit = 1,
                                 .pack_transposed_rows = kTransposedRows,
                                 .packed_bytes = packed_bytes<float>,
                                 .pack = pack<float>,
                                 .pack_transposed = pack_transposed<float, kTransposedRows>,
                                 .row_block = row_block<float>,
                                 .scratch = scratch_bytes<float>,
                                 .block = block<float>,
                                 .max_depth = 2048,
                                 .min_panels = 0,
                                 .panels_scratch = panels_scratch<float>,
                                 .fill = fill<float>,
                                 .panels = panels<float>,
                                 .direct_unit = kPanel,
                                 .direct = direct<float>};

}  // namespace

const LinearKernels* linear_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
