// Weight gradients: a block of dW stays in the second-level cache while all rows of dY and X pass
// by, kDepth at a time. The columns of dY are the rows of the left factor, so copying kTileRows of
// them side by side gives what Form::turned reads; the rows of X are copied into panels.
#include "cpu/linear_backward_kernel.h"

#include "cpu/activation_slope.h"
#include "cpu/gemm.h"
#include "cpu/philox.h"

namespace tf::TF_ISA {
namespace {

constexpr long kRowBlock = 252;  // a multiple of kTileRows, whatever the instruction set
constexpr long kColumnBlock = 512;
constexpr long kDepth = kChain;
constexpr long kPad = 16;  // keeps tiles and panels out of each other's cache sets
constexpr long kTileStride = kTurned * kDepth + kPad;
constexpr long kPanelStride = kPanel * kDepth + kPad;
constexpr long kSumStride = kColumnBlock + kPad;

struct Workspace {
  float *tiles, *panels, *sums, *bias, *factors;
  long floats = 0;

  explicit Workspace(float* scratch) {
    const auto take = [&](long count) {
      float* place = scratch != nullptr ? scratch + floats : nullptr;
      floats += round_up(count, 16);
      return place;
    };
    tiles = take((kRowBlock / kTileRows + 1) * kTileStride);
    panels = take(kColumnBlock / kPanel * kPanelStride);
    sums = take(kRowBlock * kSumStride);
    bias = take(kRowBlock + kLanes);
    factors = take(kColumnBlock + kPanel);
  }
};

TF_INLINE Vec load_some(const float* p, long n) { return n >= kLanes ? load(p) : load_n(p, n); }

struct Block {
  const WeightGradientArgs& args;
  const Workspace work;
  long row, rows, column, columns;

  // Rows [p, p + depth) of dY.
  void take_grad(long p, long depth) const {
    for (long u = 0; u < depth; ++u) {
      const float* from = args.grad + (p + u) * args.grad_stride + row;
      each_tile(rows, [&](long t, long i, long) {
        TF_UNROLL for (int v = 0; v < kTurned; v += kLanes) {
          const long have = rows - i - v;
          store(work.tiles + t * kTileStride + u * kTurned + v,
                have > 0 ? load_some(from + i + v, have) : zero());
        }
      });
    }
  }

  void add_bias(long p, long depth) const {
    for (long j = 0; j < rows; j += kLanes) {
      Vec sum = zero();
      const float* from = args.grad + p * args.grad_stride + row + j;
      for (long u = 0; u < depth; ++u)
        sum = sum + load_some(from + u * args.grad_stride, rows - j);
      store(work.bias + j, load(work.bias + j) + sum);
    }
  }

  // Rows [p, p + depth) of X.
  void take_x(long p, long depth) const {
    for (long u = 0; u < depth; ++u) {
      const float* from = args.x + (p + u) * args.x_stride + column;
      if (args.dropout.on)
        dropout_factors(args.dropout, static_cast<uint64_t>(p + u),
                        static_cast<uint64_t>(column), columns, work.factors);
      for (long j = 0; j < columns; j += kPanel) {
        float* to = work.panels + j / kPanel * kPanelStride + u * kPanel;
        TF_UNROLL for (int v = 0; v < kPanel; v += kLanes) {
          const long have = columns - j - v;
          Vec x = have > 0 ? load_some(from + j + v, have) : zero();
          if (args.activation != kIdentity) x = activate(x, args.activation);
          if (args.dropout.on) x = drop(x, load(work.factors + j + v));
          store(to + v, x);
        }
      }
    }
  }

  void multiply(long p, long depth) const {
    for (long j = 0; j < columns; j += kPanel) {
      const float* panel = work.panels + j / kPanel * kPanelStride;
      panel_rows<Form::turned>(work.tiles, kTileStride, rows, panel, depth, work.sums + j,
                               kSumStride, least(kPanel, columns - j), {nullptr, p > 0, false},
                               panel + kPanelStride);
    }
  }

  void run() const {
    const bool bias = args.grad_bias != nullptr && column == 0;
    for (long j = 0; j < rows + kLanes; ++j) work.bias[j] = 0.0f;
    for (long p = 0; p < args.m; p += kDepth) {
      const long depth = least(kDepth, args.m - p);
      if (bias) add_bias(p, depth);
      if (args.grad_weight == nullptr) continue;
      take_grad(p, depth);
      take_x(p, depth);
      multiply(p, depth);
    }
    if (bias) copy_row(work.bias, rows, args.grad_bias + row, rows);
    if (args.grad_weight != nullptr)
      for (long i = 0; i < rows; ++i)
        copy_row(work.sums + i * kSumStride, columns,
                 args.grad_weight + (row + i) * args.k + column, columns);
  }
};

}  // namespace

void pack_column_panels(const float* weight, long stride, long n, long k, float* packed, long begin,
                        long end) {
  for (long j = 0; j < n; ++j)
    for (long p = begin; p < end; ++p)
      copy_row(weight + j * stride + p * kPanel, least(kPanel, k - p * kPanel),
               packed + (p * n + j) * kPanel, kPanel);
}

long column_packed_size(long n, long k) { return round_up(k, kPanel) * n; }

void multiply_by_slope(const SlopeArgs& args, long begin, long end) {
  for (long i = begin; i < end; ++i) {
    const float* grad = args.grad + i * args.grad_stride;
    const float* z = args.z + i * args.n;
    float* to = args.to + i * args.n;
    long j = 0;
    for (; j + kLanes <= args.n; j += kLanes)
      store(to + j, through_activation(load(grad + j), load(z + j), args.activation));
    if (j < args.n)
      store_n(to + j,
              through_activation(load_n(grad + j, args.n - j), load_n(z + j, args.n - j),
                                 args.activation),
              args.n - j);
  }
}

long weight_gradient_rows() { return kRowBlock; }
long weight_gradient_columns() { return kColumnBlock; }

long weight_gradient_scratch(const WeightGradientArgs&) { return Workspace(nullptr).floats; }

void weight_gradient_block(const WeightGradientArgs& args, long row_begin, long row_end,
                           long column_begin, long column_end, float* scratch) {
  const Block block{.args = args,
                    .work = Workspace(scratch),
                    .row = row_begin,
                    .rows = row_end - row_begin,
                    .column = column_begin,
                    .columns = column_end - column_begin};
  block.run();
}

}  // namespace tf::TF_ISA
