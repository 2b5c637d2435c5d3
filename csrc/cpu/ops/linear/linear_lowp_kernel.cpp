// Linear layer with epilogue for bfloat16 and float16.
#include "cpu/ops/linear/linear_direct.h"

namespace tf::TF_ISA {
namespace {

template <class T>
constexpr LinearKernels kKernels{.in_fp32 = false,
                                 .layout = kPanel + (sizeof(typename Product<T>::Operand) == 2),
                                 .panel = kPanel,
                                 .row_unit = 1,
                                 .pack_transposed_rows = kPackRows,
                                 .packed_bytes = packed_bytes<T>,
                                 .pack = pack<T>,
                                 .pack_transposed = pack_transposed<T>,
                                 .row_block = row_block<T>,
                                 .scratch = scratch_bytes<T>,
                                 .block = block<T>,
                                 .max_depth = 4096,
                                 .min_panels = 4,
                                 .panels_scratch = panels_scratch<T>,
                                 .fill = fill<T>,
                                 .panels = panels<T>,
                                 .direct_unit = kPanel,
                                 .direct = direct<T>};

}  // namespace

const LinearKernels* lowp_linear_kernels(Element type) {
  return type == Element::bfloat16 ? &kKernels<BFloat16> : &kKernels<Float16>;
}

}  // namespace tf::TF_ISA
