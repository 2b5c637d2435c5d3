// The feed-forward network in fp32 on bfloat16 units, by pieces (bf16_tiles.h).
#pragma once

#include "cpu/core/isa.h"
#include "cpu/ops/feed_forward/feed_forward_kernel.h"

namespace tf {

// Rows that one call of split_feed_forward_rows should be given, at most.
TF_KERNEL_SPLIT(long split_feed_forward_row_block(const FeedForwardArgs& args))

// Bytes of scratch split_feed_forward_rows needs for that many rows.
TF_KERNEL_SPLIT(long split_feed_forward_scratch(const FeedForwardArgs& args, long rows))

// Rows [begin, end) with W1 and W2 in pieces (linear_split_kernel.h) in place of args' packed ones.
TF_KERNEL_SPLIT(void split_feed_forward_rows(const FeedForwardArgs& args, const void* packed1,
                                             const void* packed2, long begin, long end,
                                             void* scratch))

}  // namespace tf
