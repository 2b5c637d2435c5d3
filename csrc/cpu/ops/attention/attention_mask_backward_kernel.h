// The gradient of what attention adds to its scores: scores are worked out once more.
#pragma once

#include "cpu/ops/attention/attention_backward_kernel.h"

namespace tf {

// Keys and queries that are taken at a time. The cut does not depend on the number of threads.
TF_KERNEL(long attention_mask_backward_keys(const AttentionBackwardArgs& args))
TF_KERNEL(long attention_mask_backward_queries(const AttentionBackwardArgs& args))

// Floats of scratch attention_mask_backward needs.
TF_KERNEL(long attention_mask_backward_scratch(const AttentionBackwardArgs& args))

// grad_mask at (b, h) of the mask: key tile `tile` (all if the mask has one column) and query
// blocks [begin, end), summed over what the mask is broadcast over.
TF_KERNEL(void attention_mask_backward(const AttentionBackwardArgs& args, long b, long h, long tile,
                                       long begin, long end, float* scratch))

}  // namespace tf
