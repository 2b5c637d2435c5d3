// Feed-forward network ("Attention Is All You Need", section 3.3) over a block of rows: a slice of
// the hidden units is computed, activated and multiplied into the result while it is in cache, so
// the (rows, F) hidden matrix never exists.
#include "cpu/feed_forward_kernel.h"

#include "cpu/activation.h"
#include "cpu/gemm.h"

namespace tf::TF_ISA {
namespace {

constexpr long kHidden = 512;  // hidden units per slice
constexpr long kPad = 16;      // keeps the rows of a tile out of each other's cache sets
constexpr long kBudget = 768 * 1024 / sizeof(float);

struct Layout {
  long x_stride, hidden_stride, y_stride;
  explicit Layout(const FeedForwardArgs& args)
      : x_stride(round_up(args.k, kLanes) + kPad),
        hidden_stride(least(kHidden, round_up(args.f, kPanel)) + kPad),
        y_stride(round_up(args.n, kPanel) + kPad) {}
  long row() const { return x_stride + hidden_stride + y_stride; }
};

}  // namespace

long feed_forward_row_block(const FeedForwardArgs& args) {
  const long rows = kBudget / Layout(args).row() / kTileRows * kTileRows;
  return most(2 * kTileRows, least(8 * kTileRows, rows));
}

long feed_forward_scratch(const FeedForwardArgs& args, long rows) {
  return rows * Layout(args).row() + kPanel;
}

void feed_forward_rows(const FeedForwardArgs& args, long begin, long end, float* scratch) {
  const Layout layout(args);
  const long rows = end - begin;
  float* x = scratch;
  float* hidden = x + rows * layout.x_stride;
  float* y = hidden + rows * layout.hidden_stride;
  float* edge_bias = y + rows * layout.y_stride;
  for (long i = 0; i < rows; ++i)
    copy_row(args.x + (begin + i) * args.x_stride, args.k, x + i * layout.x_stride, args.k);
  for (long i = 0; i < rows; ++i) {
    if (args.bias2 != nullptr) {
      copy_row(args.bias2, args.n, y + i * layout.y_stride, round_up(args.n, kLanes));
    } else {
      for (long j = 0; j < args.n; j += kLanes) store(y + i * layout.y_stride + j, zero());
    }
  }
  for (long f = 0; f < args.f; f += kHidden) {
    const long units = least(kHidden, args.f - f);
    for (long j = 0; j < units; j += kPanel) {
      const long columns = least(kPanel, units - j);
      const float* bias = args.bias1 != nullptr ? args.bias1 + f + j : nullptr;
      if (bias != nullptr && columns < kPanel) {
        copy_row(bias, columns, edge_bias, kPanel);
        bias = edge_bias;
      }
      panel_rows(x, layout.x_stride, rows, args.packed1 + (f + j) * args.k, args.k, hidden + j,
                 layout.hidden_stride, columns, {bias, false, args.activation == kRelu},
                 args.packed1 + (f + j + kPanel) * args.k);
    }
    if (args.activation > kRelu)
      activate_rows(hidden, layout.hidden_stride, rows, units, args.activation);
    for (long j = 0; j < args.n; j += kPanel)
      panel_rows(hidden, layout.hidden_stride, rows, args.packed2 + j * args.f + f * kPanel, units,
                 y + j, layout.y_stride, least(kPanel, args.n - j), {nullptr, true, false},
                 args.packed2 + (j + kPanel) * args.f + f * kPanel);
  }
  for (long i = 0; i < rows; ++i)
    copy_row(y + i * layout.y_stride, args.n, args.y + (begin + i) * args.n, args.n);
}

}  // namespace tf::TF_ISA
