#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_backward_block.h"

namespace tf::TF_ISA {

long attention_mask_backward_keys(const AttentionBackwardArgs& args) { return keys_per_tile(args); }

long attention_mask_backward_queries(const AttentionBackwardArgs& args) {
  return Products::query_rows(args);
}

long attention_mask_backward_scratch(const AttentionBackwardArgs& args) {
  return Workspace(args, nullptr).floats;
}

void attention_mask_backward(const AttentionBackwardArgs& args, long mask_b, long mask_h, long tile,
                             long begin, long end, float* scratch) {
  loop_mask<Products>(args, Workspace(args, scratch), keys_per_tile(args), mask_b, mask_h, tile,
                      begin, end);
}

}  // namespace tf::TF_ISA
