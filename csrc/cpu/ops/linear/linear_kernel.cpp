// Linear layer with epilogue in fp32.
#include "cpu/ops/linear/linear_direct.h"

namespace tf::TF_ISA {

const LinearKernels* linear_kernels() { return &kLinearKernels<float>; }

}  // namespace tf::TF_ISA
