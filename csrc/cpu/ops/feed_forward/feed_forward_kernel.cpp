// Feed-forward network in fp32 with FMA.
#include "cpu/ops/feed_forward/feed_forward_slices.h"

namespace tf::TF_ISA {
namespace {

constexpr FeedForwardKernels kKernels{
    .row_unit = 1, .row_block = row_block, .scratch = scratch_bytes, .rows = all_rows};

}  // namespace

const FeedForwardKernels* feed_forward_kernels() { return &kKernels; }

void feed_forward_hidden(const FeedForwardArgs& args, float* hidden, long begin, long end) {
  for (long i = begin; i < end; ++i) {
    KeepBits keep = 0;
    for (long j = 0; j < args.f; j += kPanel) {
      float* at = hidden + i * args.f + j;
      const long count = args.f - j;
      Vec low = load_some(at, count);
      Vec high = count > kLanes ? load_some(at + kLanes, count - kLanes) : zero();
      const Epilogue<float> epilogue(nullptr, j, args.f, args.activation);
      activate_hidden<true>(args, epilogue, i, j, keep, low, high);
      epilogue.write(at, low, high);
    }
  }
}

}  // namespace tf::TF_ISA
