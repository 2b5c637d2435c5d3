// Attention backward for fp32 in pieces.
#include "cpu/attention_backward_split_kernel.h"

#include "cpu/attention_backward_product.h"

namespace tf::TF_ISA {

long split_attention_backward_keys(const AttentionBackwardArgs& args) {
  return keys_per_tile(args);
}

long split_attention_backward_scratch(const AttentionBackwardArgs& args) {
  return BackwardWorkspace<float>(args, nullptr).bytes;
}

bool split_attention_backward(const AttentionBackwardArgs& args, long b, long key_head, long begin,
                              long end, float* part, void* scratch) {
  return differentiate<float>(args, b, key_head, begin, end, part, scratch);
}

}  // namespace tf::TF_ISA
