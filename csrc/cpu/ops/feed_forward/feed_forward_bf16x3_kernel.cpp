// Feed-forward network in fp32 with bf16x3.
#include "cpu/ops/feed_forward/feed_forward_slices.h"

namespace tf::TF_ISA {
namespace {

constexpr FeedForwardKernels kKernels{
    .row_unit = P::kPair, .row_block = row_block, .scratch = scratch_bytes, .rows = all_rows};

}  // namespace

const FeedForwardKernels* bf16x3_feed_forward_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
