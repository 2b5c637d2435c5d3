// fp32 products by pieces on bfloat16 units (bf16_tiles.h), shared out between threads.
#pragma once

#include <algorithm>

#include "cpu/core/host.h"
#include "cpu/ops/feed_forward/feed_forward_split_kernel.h"
#include "cpu/ops/linear/linear_few_split_kernel.h"
#include "cpu/ops/linear/linear_kernel.h"
#include "cpu/ops/linear/linear_split_kernel.h"

namespace tf {

#ifdef TF_HAVE_AMX
namespace pieces {

using namespace amx;

// W (n, k), or the transpose of W (k, n), into panels.
inline void pack(const Rows& weight, int64_t n, int64_t k, bool transposed, void* place) {
  const int64_t width = TF_DISPATCH(panel_columns, );
  torch::stable::parallel_for(
      0, (n + width - 1) / width, std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, k))),
      [&](int64_t begin, int64_t end) {
        split_pack_panels(weight.data, weight.stride, n, k, transposed, place, begin, end);
      });
}

// Where part `part` of `parts` of m rows begins: pairs of tiles stay whole.
inline int64_t row_of_part(int64_t m, int64_t part, int64_t parts) {
  constexpr int64_t kPair = 32;
  return std::min(m, (m + kPair - 1) / kPair * part / parts * kPair);
}

// Splits rows between threads where there are many, else panels.
inline void run_linear(const TypedLinearArgs& args) {
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t panels = (args.n + width - 1) / width;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t most = split_linear_row_block(args);
  int64_t row_items = (args.m + most - 1) / most, column_items = 1;
  if (args.m >= 64 * threads) {
    row_items = (row_items + threads - 1) / threads * threads;
  } else {
    column_items = std::min<int64_t>(panels, 2 * threads);
  }
  const int64_t scratch = split_linear_scratch(args);
  for_each_item(row_items * column_items, [&](int64_t item) {
    const int64_t row = item / column_items, column = item % column_items;
    const int64_t begin = row_of_part(args.m, row, row_items);
    const int64_t end = row_of_part(args.m, row + 1, row_items);
    if (begin == end) return;
    split_linear_block(args, begin, end, panels * column / column_items,
                       panels * (column + 1) / column_items, bytes_of(kernel_scratch(), scratch));
  });
}

inline TypedLinearArgs typed(const LinearArgs& args, const void* packed) {
  return {Element::float32,
          args.x,
          packed,
          args.bias,
          args.residual,
          args.y,
          args.m,
          args.k,
          args.n,
          args.x_stride,
          args.residual_stride,
          args.y_stride,
          args.activation,
          args.preactivation};
}

// The same for few rows and weights in panels of fp32.
inline void run_few_linear(const TypedLinearArgs& args) {
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t panels = (args.n + width - 1) / width;
  const int64_t threads = torch::stable::get_num_threads();
  // Each item splits the rows, so there are more items than threads only where those are long.
  constexpr int64_t kPanels = 32;
  const int64_t items =
      std::min(panels, std::max(threads, std::min(4 * threads, panels / kPanels)));
  const int64_t scratch = few_split_linear_scratch(args);
  for_each_item(items, [&](int64_t item) {
    few_split_linear_block(args, panels * item / items, panels * (item + 1) / items,
                           bytes_of(kernel_scratch(), scratch));
  });
}

inline void run_feed_forward(const FeedForwardArgs& args, const void* packed1,
                             const void* packed2) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t most = split_feed_forward_row_block(args);
  int64_t blocks = (args.m + most - 1) / most;
  blocks = (blocks + threads - 1) / threads * threads;
  const int64_t scratch = split_feed_forward_scratch(args, std::min(most, args.m));
  for_each_item(blocks, [&](int64_t item) {
    const int64_t begin = row_of_part(args.m, item, blocks);
    const int64_t end = row_of_part(args.m, item + 1, blocks);
    if (begin == end) return;
    split_feed_forward_rows(args, packed1, packed2, begin, end,
                            bytes_of(kernel_scratch(), scratch));
  });
}

}  // namespace pieces
#endif

}  // namespace tf
