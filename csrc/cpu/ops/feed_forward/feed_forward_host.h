// Sharing the feed-forward network out between threads.
#pragma once

#include "cpu/ops/feed_forward/feed_forward_kernel.h"
#include "cpu/ops/linear/linear_host.h"

namespace tf {

// One map after the other, first(args) and second(args), for few rows: threads share the columns of
// each, and the small hidden block, in shared scratch `slot`, stays in cache.
template <class First, class Second>
void feed_forward_by_maps(const FeedForwardArgs& args, int slot, const First& first,
                          const Second& second) {
  const bool training = trains(args);
  float* hidden = shared_scratch(slot).floats(args.m, args.f);
  first(LinearArgs{args.x, nullptr, args.bias1, nullptr, hidden, args.m, args.k, args.f,
                   args.x_stride, 0, args.f, training ? 0 : args.activation});
  if (training) {
    const int64_t room = TF_DISPATCH(feed_forward_hidden_scratch, args);
    const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, args.f));
    torch::stable::parallel_for(0, args.m, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(feed_forward_hidden, args, hidden, begin, end, kernel_scratch().floats(room));
    });
  }
  // Where only the hidden units are wanted, there is no second weight.
  if (args.y != nullptr)
    second(LinearArgs{hidden, nullptr, args.bias2, args.residual, args.y, args.m, args.f, args.n,
                      args.f, args.residual_stride, args.n, 0});
}

// The same if there are few rows, with packed weights, weights that are read as they are, and those
// that are packed now; false if there are many.
inline bool run_small_feed_forward(const FeedForwardArgs& args, const Tensor& weight1,
                                   const std::optional<Tensor>& packed1, const Tensor& weight2,
                                   const std::optional<Tensor>& packed2, int slot) {
  if (args.m >= 56 * torch::stable::get_num_threads()) return false;
  feed_forward_by_maps(
      args, slot, [&](const LinearArgs& map) { run_linear(map, weight1, packed1, 0); },
      [&](const LinearArgs& map) { run_linear(map, weight2, packed2, 1); });
  return true;
}

// `slot`: the shared scratch for the hidden block of a call of few rows.
inline void run_feed_forward(FeedForwardArgs args, const Panels& panels1, const Panels& panels2,
                             int slot) {
  const int64_t threads = torch::stable::get_num_threads();
  const bool mixed = args.y != nullptr && (panels1.whole == nullptr) != (panels2.whole == nullptr);
  if (args.m < 56 * threads || mixed || splits_panels(args.m))
    return feed_forward_by_maps(
        args, slot, [&](const LinearArgs& map) { run_linear(map, panels1); },
        [&](const LinearArgs& map) { run_linear(map, panels2); });
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
