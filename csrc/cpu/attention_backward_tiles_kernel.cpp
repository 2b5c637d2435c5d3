#include "cpu/attention_backward_tiles_kernel.h"

#include "cpu/attention_backward_product.h"

namespace tf::TF_ISA {

long tiles_attention_backward_keys(const AttentionBackwardArgs& args) {
  return keys_per_tile(args);
}

long tiles_attention_backward_scratch(const AttentionBackwardArgs& args) {
  return args.type == Element::float32 ? BackwardWorkspace<float>(args, nullptr).bytes
                                       : BackwardWorkspace<BFloat16>(args, nullptr).bytes;
}

bool tiles_attention_backward(const AttentionBackwardArgs& args, long b, long key_head, long begin,
                              long end, float* part, void* scratch) {
  return (args.type == Element::float32
              ? differentiate<float>
              : differentiate<BFloat16>)(args, b, key_head, begin, end, part, scratch);
}

}  // namespace tf::TF_ISA
