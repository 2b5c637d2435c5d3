// Sharing the feed-forward network out between threads.
#pragma once

#include "cpu/feed_forward_kernel.h"
#include "cpu/linear_host.h"

namespace tf {

// `slot`: the shared scratch for the hidden block of a call of few rows.
inline void run_feed_forward(FeedForwardArgs args, const Panels& panels1, const Panels& panels2,
                             int slot) {
  const int64_t threads = torch::stable::get_num_threads();
  const bool training = trains(args);
  // Where only the hidden units are wanted, there is no second weight.
  const bool mixed = args.y != nullptr && (panels1.whole == nullptr) != (panels2.whole == nullptr);
  if (args.m < 56 * threads || mixed || splits_panels(args.m)) {
    // Too few rows to share out: threads take columns, the small hidden block stays in cache.
    float* hidden = shared_scratch(slot).floats(args.m * args.f);
    run_linear({args.x, nullptr, args.bias1, nullptr, hidden, args.m, args.k, args.f, args.x_stride,
                0, args.f, training ? 0 : args.activation},
               panels1);
    if (training) {
      const int64_t room = TF_DISPATCH(feed_forward_hidden_scratch, args);
      const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, args.f));
      torch::stable::parallel_for(0, args.m, grain, [&](int64_t begin, int64_t end) {
        TF_DISPATCH(feed_forward_hidden, args, hidden, begin, end, kernel_scratch().floats(room));
      });
    }
    if (args.y == nullptr) return;
    run_linear({hidden, nullptr, args.bias2, args.residual, args.y, args.m, args.f, args.n, args.f,
                args.residual_stride, args.n, 0},
               panels2);
    return;
  }
#ifdef TF_HAVE_AMX
  if (panels1.pieces != nullptr) {
    return pieces::run_feed_forward(args, panels1.pieces, panels2.pieces);
  }
#endif
  args.packed1 = panels1.whole;
  args.packed2 = panels2.whole;
  const int64_t most = TF_DISPATCH(feed_forward_row_block, args);
  int64_t blocks = (args.m + most - 1) / most;
  blocks = (blocks + threads - 1) / threads * threads;
  const int64_t scratch = TF_DISPATCH(feed_forward_scratch, args, (args.m + blocks - 1) / blocks);
  for_each_item(blocks, [&](int64_t item) {
    TF_DISPATCH(feed_forward_rows, args, args.m * item / blocks, args.m * (item + 1) / blocks,
                kernel_scratch().floats(scratch));
  });
}

}  // namespace tf
