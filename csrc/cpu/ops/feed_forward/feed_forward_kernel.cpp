// Feed-forward network ("Attention Is All You Need", section 3.3) in fp32 over a block of rows: a
// slice of the hidden units is computed, activated and multiplied into the result while it is in
// cache, so the (rows, F) hidden matrix is never materialized.
#include "cpu/gemm/gemm.h"
#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/simd/activation_slope.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

const float* floats(const void* place) { return static_cast<const float*>(place); }
float* floats(void* place) { return static_cast<float*>(place); }

constexpr long kHidden = 512;  // hidden units per slice
constexpr long kPad = 16;      // avoids cache set conflicts between rows of y
constexpr long kBudget = 768 * 1024 / sizeof(float);

// Sizes in floats; x and the hidden slice are packed in micro-panels.
struct Layout {
  long x_tile, hidden_tile, y_stride;
  explicit Layout(const FeedForwardArgs& args)
      : x_tile(kPackedRows * round_up(args.k, kLanes)),
        hidden_tile(kPackedRows * min(kHidden, round_up(args.f, kPanel))),
        y_stride(round_up(args.n, kPanel) + kPad) {}
  long tiles(long rows) const {
    return (rows + kTileRows - 1) / kTileRows * (x_tile + hidden_tile);
  }
};

// Activation and dropout (or their backward) of columns [unit, unit + columns) of one row of hidden
// units, in place, padded to whole vectors; `factors` has room for round_up(columns, kPanel).
void activate_hidden(const FeedForwardArgs& args, long row, long unit, long columns, float* hidden,
                     float* factors) {
  const long place = row * args.f + unit;
  if (args.preactivation != nullptr)
    copy_row(hidden, columns, floats(args.preactivation) + place, columns);
  if (args.dropout.on)
    dropout_factors(args.dropout, static_cast<uint64_t>(args.row + row),
                    static_cast<uint64_t>(unit), columns, factors);
  for (long j = 0; j < columns; j += kLanes) {
    Vec x = load(hidden + j);
    if (args.slope_at == nullptr) x = activate(x, args.activation);
    if (args.dropout.on) x = drop(x, load(factors + j));
    if (args.slope_at != nullptr) {
      const float* at = floats(args.slope_at) + place + j;
      Vec h = columns - j >= kLanes ? load(at) : load_n(at, columns - j);
      x = activation_backward(x, h, args.activation);
      if (args.panels != nullptr)
        store(floats(args.panels) + weight_gradient_place(args.m, row, unit + j),
              args.dropout.on ? drop(h, load(factors + j)) : h);
    }
    store(hidden + j, x);
  }
  if (args.hidden != nullptr) copy_row(hidden, columns, floats(args.hidden) + place, columns);
}

long row_block(const FeedForwardArgs& args) {
  const Layout layout(args);
  const long tile = layout.tiles(1) + kTileRows * layout.y_stride;
  return kTileRows * max(2, min(8, kBudget / tile));
}

long scratch_bytes(const FeedForwardArgs& args, long rows) {
  const Layout layout(args);
  return (layout.tiles(rows) + rows * (layout.y_stride + kPanel) + 2 * kPanel) *
         static_cast<long>(sizeof(float));
}

void all_rows(const FeedForwardArgs& args, long begin, long end, void* scratch) {
  const Layout layout(args);
  const long rows = end - begin, tiles = (rows + kTileRows - 1) / kTileRows;
  const float *bias1 = floats(args.bias1), *bias2 = floats(args.bias2);
  const float *w1 = floats(args.packed1), *w2 = floats(args.packed2);
  float* x = floats(scratch);
  float* hidden = x + tiles * layout.x_tile;
  float* y = hidden + tiles * layout.hidden_tile;
  float* slice = y + rows * layout.y_stride;  // a panel of hidden units, row-major
  float* edge_bias = slice + rows * kPanel;
  float* factors = edge_bias + kPanel;
  const bool training = trains(args), fused_relu = args.activation == kRelu && !training;
  pack_a(floats(args.x) + begin * args.x_stride, args.x_stride, rows, args.k, x, layout.x_tile);
  for (long i = 0; i < rows; ++i) {
    if (bias2 != nullptr) {
      copy_row(bias2, args.n, y + i * layout.y_stride, round_up(args.n, kLanes));
    } else {
      for (long j = 0; j < args.n; j += kLanes) store(y + i * layout.y_stride + j, zero());
    }
  }
  for (long f = 0; f < args.f; f += kHidden) {
    const long units = min(kHidden, args.f - f);
    for (long j = 0; j < units; j += kPanel) {
      const long columns = min(kPanel, units - j);
      const float* bias = bias1 != nullptr ? bias1 + f + j : nullptr;
      if (bias != nullptr && columns < kPanel) {
        copy_row(bias, columns, edge_bias, kPanel);
        bias = edge_bias;
      }
      panel_rows<Form::packed>(x, layout.x_tile, rows, w1 + (f + j) * args.k, args.k, slice, kPanel,
                               columns, {bias, false, fused_relu}, w1 + (f + j + kPanel) * args.k);
      if (training) {
        for (long i = 0; i < rows; ++i)
          activate_hidden(args, begin + i, f + j, columns, slice + i * kPanel, factors);
      } else if (args.activation > kRelu) {
        activate_rows(slice, kPanel, rows, columns, args.activation);
      }
      if (args.y == nullptr) continue;
      pack_a(slice, kPanel, rows, columns, hidden + j * kPackedRows, layout.hidden_tile);
    }
    for (long j = 0; j < args.n && args.y != nullptr; j += kPanel)
      panel_rows<Form::packed>(hidden, layout.hidden_tile, rows, w2 + j * args.f + f * kPanel,
                               units, y + j, layout.y_stride, min(kPanel, args.n - j),
                               {nullptr, true, false}, w2 + (j + kPanel) * args.f + f * kPanel);
  }
  for (long i = 0; i < rows && args.y != nullptr; ++i) {
    float* sums = y + i * layout.y_stride;
    // Added last, as by two linear layers: the partition of rows must not affect the result.
    if (args.residual != nullptr) {
      const float* add = floats(args.residual) + (begin + i) * args.residual_stride;
      for (long j = 0; j < args.n; ++j) sums[j] += add[j];
    }
    copy_row(sums, args.n, floats(args.y) + (begin + i) * args.n, args.n);
  }
}

constexpr FeedForwardKernels kKernels{
    .row_unit = 1, .row_block = row_block, .scratch = scratch_bytes, .rows = all_rows};

}  // namespace

const FeedForwardKernels* feed_forward_kernels() { return &kKernels; }

long feed_forward_hidden_scratch(const FeedForwardArgs& args) {
  return 2 * (round_up(args.f, kPanel) + kPanel);
}

void feed_forward_hidden(const FeedForwardArgs& args, float* hidden, long begin, long end,
                         float* scratch) {
  float* factors = scratch + round_up(args.f, kPanel) + kPanel;
  for (long i = begin; i < end; ++i) {
    copy_row(hidden + i * args.f, args.f, scratch, round_up(args.f, kLanes));
    activate_hidden(args, i, 0, args.f, scratch, factors);
    copy_row(scratch, args.f, hidden + i * args.f, args.f);
  }
}

}  // namespace tf::TF_ISA
