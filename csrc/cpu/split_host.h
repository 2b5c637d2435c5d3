// fp32 products by pieces on bfloat16 units (bf16_tiles.h), shared out between threads.
#pragma once

#include <algorithm>

#include "cpu/feed_forward_split_kernel.h"
#include "cpu/host.h"
#include "cpu/linear_kernel.h"
#include "cpu/linear_split_kernel.h"

namespace tf {

#ifdef TF_HAVE_AMX
namespace pieces {

using namespace amx;

inline char* bytes_of(Scratch& scratch, int64_t bytes) {
  return reinterpret_cast<char*>(scratch.floats((bytes + 3) / static_cast<int64_t>(sizeof(float))));
}

// W (n, k), or the transpose of W (k, n), into panels.
inline void pack(const Rows& weight, int64_t n, int64_t k, bool transposed, void* place) {
  const int64_t width = TF_DISPATCH(panel_columns, );
  torch::stable::parallel_for(
      0, (n + width - 1) / width, std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, k))),
      [&](int64_t begin, int64_t end) {
        split_pack_panels(weight.data, weight.stride, n, k, transposed, place, begin, end);
      });
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
    split_linear_block(args, args.m * row / row_items, args.m * (row + 1) / row_items,
                       panels * column / column_items, panels * (column + 1) / column_items,
                       bytes_of(kernel_scratch(), scratch));
  });
}

inline TypedLinearArgs typed(const LinearArgs& args, const void* packed) {
  return {Element::float32, args.x,        packed, args.bias, args.residual,
          args.y,           args.m,        args.k, args.n,    args.x_stride,
          args.residual_stride, args.y_stride, args.activation, args.preactivation};
}

// What a training step or its backward keeps lies in memory, so hidden units pass through memory,
// a block of rows at a time.
inline void run_training(const FeedForwardArgs& args, const void* packed1, const void* packed2) {
  constexpr int64_t kRows = 128;
  const LinearArgs whole1{args.x, nullptr, args.bias1,    nullptr, nullptr, args.m, args.k,
                          args.f, args.x_stride, 0,       args.f,  0};
  const LinearArgs whole2{nullptr, nullptr, args.bias2, args.residual,        args.y, args.m,
                          args.f,  args.n,  args.f,     args.residual_stride, args.n, 0};
  const int64_t threads = torch::stable::get_num_threads();
  int64_t blocks = (args.m + kRows - 1) / kRows;
  blocks = (blocks + threads - 1) / threads * threads;
  const int64_t room = TF_DISPATCH(feed_forward_hidden_scratch, args) * 4;
  const int64_t linear = std::max(split_linear_scratch(typed(whole1, nullptr)),
                                  split_linear_scratch(typed(whole2, nullptr)));
  const int64_t hidden_bytes = ((args.m + blocks - 1) / blocks * args.f * 4 + 63) / 64 * 64;
  const int64_t width = TF_DISPATCH(panel_columns, );
  for_each_item(blocks, [&](int64_t item) {
    const int64_t begin = args.m * item / blocks, end = args.m * (item + 1) / blocks;
    char* scratch = bytes_of(kernel_scratch(), hidden_bytes + std::max(linear, room));
    // feed_forward_hidden and the maps count rows from the first of the call.
    float* hidden = reinterpret_cast<float*>(scratch);
    char* rest = scratch + hidden_bytes;
    TypedLinearArgs first = typed(whole1, packed1), second = typed(whole2, packed2);
    first.x = args.x + begin * args.x_stride;
    first.y = hidden;
    first.m = end - begin;
    split_linear_block(first, 0, first.m, 0, (args.f + width - 1) / width, rest);
    TF_DISPATCH(feed_forward_hidden, args, hidden - begin * args.f, begin, end,
                reinterpret_cast<float*>(rest));
    if (args.y == nullptr) return;
    second.x = hidden;
    second.m = end - begin;
    second.y = args.y + begin * args.n;
    if (args.residual != nullptr) second.residual = args.residual + begin * args.residual_stride;
    split_linear_block(second, 0, second.m, 0, (args.n + width - 1) / width, rest);
  });
}

inline void run_feed_forward(const FeedForwardArgs& args, const void* packed1,
                             const void* packed2) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t most = split_feed_forward_row_block(args);
  int64_t blocks = (args.m + most - 1) / most;
  blocks = (blocks + threads - 1) / threads * threads;
  const int64_t scratch = split_feed_forward_scratch(args, (args.m + blocks - 1) / blocks);
  for_each_item(blocks, [&](int64_t item) {
    split_feed_forward_rows(args, packed1, packed2, args.m * item / blocks,
                            args.m * (item + 1) / blocks, bytes_of(kernel_scratch(), scratch));
  });
}

}  // namespace pieces
#endif

}  // namespace tf
