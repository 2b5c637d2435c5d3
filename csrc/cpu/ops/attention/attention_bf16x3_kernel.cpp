// Attention for fp32 with bf16x3.
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_product.h"

namespace tf::TF_ISA {

long bf16x3_attention_scratch(const AttentionArgs& args) {
  return Workspace<float>(args, nullptr).bytes;
}

void bf16x3_attention_queries(const AttentionArgs& args, long b, long key_head, long begin,
                              long end, void* scratch) {
  attend<float>(args, b, key_head, begin, end, scratch);
}

}  // namespace tf::TF_ISA
