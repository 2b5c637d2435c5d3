// Attention for bfloat16 and float16.
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_product.h"

namespace tf::TF_ISA {

long lowp_attention_scratch(const AttentionArgs& args) {
  return args.type == Element::bfloat16 ? Workspace<BFloat16>(args, nullptr).bytes
                                        : Workspace<Float16>(args, nullptr).bytes;
}

void lowp_attention_queries(const AttentionArgs& args, long b, long key_head, long begin, long end,
                            void* scratch) {
  (args.type == Element::bfloat16 ? attend<BFloat16> : attend<Float16>)(args, b, key_head, begin,
                                                                        end, scratch);
}

}  // namespace tf::TF_ISA
