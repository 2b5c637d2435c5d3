// Linear layer with epilogue for bfloat16 and float16.
#include "cpu/ops/linear/linear_direct.h"

namespace tf::TF_ISA {

const LinearKernels* lowp_linear_kernels(Element type) {
  return type == Element::bfloat16 ? &kLinearKernels<BFloat16> : &kLinearKernels<Float16>;
}

}  // namespace tf::TF_ISA
