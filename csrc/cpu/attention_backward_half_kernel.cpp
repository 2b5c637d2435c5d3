// Attention backward for bfloat16.
#include "cpu/attention_backward_half_kernel.h"

#include "cpu/attention_backward_product.h"

namespace tf::TF_ISA {

long half_attention_backward_keys(const AttentionBackwardArgs& args) { return keys_per_tile(args); }

long half_attention_backward_scratch(const AttentionBackwardArgs& args) {
  return BackwardWorkspace<BFloat16>(args, nullptr).bytes;
}

bool half_attention_backward(const AttentionBackwardArgs& args, long b, long key_head, long begin,
                             long end, float* part, void* scratch) {
  return differentiate<BFloat16>(args, b, key_head, begin, end, part, scratch);
}

}  // namespace tf::TF_ISA
