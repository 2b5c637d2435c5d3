// Attention for bfloat16 and float16, and for fp32 with bf16x3.
#include "cpu/ops/attention/attention_product.h"

namespace tf::TF_ISA {

const AttentionKernels* lowp_attention_kernels(Element type) {
#if defined(__AMX_BF16__)
  if (type == Element::float32) return &kAttentionKernels<float>;
#endif
  return type == Element::bfloat16 ? &kAttentionKernels<BFloat16> : &kAttentionKernels<Float16>;
}

}  // namespace tf::TF_ISA
