// Attention backward on bfloat16 units.
#include "cpu/ops/attention/attention_backward_rows.h"

namespace tf::TF_ISA {

// float with AMX only.
const AttentionBackwardKernels* bf16_attention_backward_kernels([[maybe_unused]] Element type) {
#if defined(__AMX_BF16__)
  if (type == Element::float32) return &kKernels<float>;
#endif
  return &kKernels<BFloat16>;
}

}  // namespace tf::TF_ISA
