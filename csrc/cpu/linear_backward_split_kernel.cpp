// Weight gradients of fp32 in pieces: X is split once; then a block of dW stays in the second-level
// cache while all rows pass by, kDepth at a time. dY's rows are turned when they are split.
#include "cpu/linear_backward_split_kernel.h"

#include "cpu/half_product.h"
#include "cpu/weight_gradient_panels.h"

namespace tf::TF_ISA {
namespace {

using P = Product<float>;
using Operand = P::Operand;

constexpr long kRowBlock = 256, kColumnBlock = 512;
constexpr long kDepth = P::kChain;
constexpr long kTile = 16;
constexpr long kSumStride = kColumnBlock + 16;  // off the powers of two

struct Workspace {
  Operand* grad;
  float* sums;
  long bytes = 0;

  explicit Workspace(void* scratch) {
    const auto take = [&](auto*& place, long count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<long>(sizeof(*place)), 64);
    };
    take(grad, P::block_size(kRowBlock, kDepth));
    take(sums, kRowBlock * kSumStride);
  }
};

// X from a row and a column (a multiple of kPanel) on.
const float* x_at(const WeightGradientArgs& args, long row, long column) {
  return reads_x(args) ? args.x + row * args.x_stride + column
                       : args.panels + weight_gradient_place(args.m, row, column);
}
long x_stride(const WeightGradientArgs& args) { return reads_x(args) ? args.x_stride : kPanel; }

struct Block {
  const WeightGradientArgs& args;
  const Workspace work;
  long row, rows, column, columns;

  // Rows [p, p + depth) of dY, turned: 16 of its columns and kPairDepth rows make a tile.
  void take_grad(long p, long depth) const {
    alignas(64) float turned[2][kTile * kTile];
    for (long u = 0; u < depth; u += kPairDepth) {
      for (long i = 0; i < rows; i += kTile) {
        turn(p + u, least(kTile, depth - u), i, turned[0]);
        turn(p + u + kTile, least(kTile, depth - u - kTile), i, turned[1]);
        Operand* tile = P::chunk(work.grad, kDepth, i, u);
        for (long r = 0; r < kTile; ++r)
          P::put_finite(tile + r * kPanel, load(turned[0] + r * kTile),
                        load(turned[1] + r * kTile));
      }
    }
  }

  // to[r][j] = dY[p + j][row + i + r], r and j < kTile, with zeros from j = count on.
  void turn(long p, long count, long i, float* to) const {
    const float* from = args.grad + p * args.grad_stride + row + i;
    if (rows - i >= kTile && count == kTile)
      return transpose_block(from, args.grad_stride, to, kTile);
    alignas(64) float some[kTile * kTile] = {};
    for (long j = 0; j < count; ++j)
      store(some + j * kTile, load_some(from + j * args.grad_stride, least(kTile, rows - i)));
    transpose_block(some, kTile, to, kTile);
  }

  // The products of rows [p, p + depth), added to what is there if `onto`.
  void multiply(long p, long depth, bool onto) const {
    const long size = P::panel_size(args.m), calls = P::steps(rows, depth);
    const long bytes = P::panel_size(depth) * static_cast<long>(sizeof(Operand));
    for (long j = 0; j < columns; j += kPanel) {
      const Operand* panel = static_cast<const Operand*>(args.pieces) +
                             (column + j) / kPanel * size + P::panel_size(p);
      FetchAhead fetch(panel + size, bytes, calls);
      P::multiply_to(work.grad, kDepth, rows, depth, panel, onto, work.sums + j, kSumStride,
                     [&]() __attribute__((always_inline)) { fetch(); });
    }
  }

  float* weight_row(long i) const { return args.grad_weight + (row + i) * args.k + column; }

  // kPanel columns of a row of the result by fp32 FMA, for numbers that have no pieces.
  void plain(long i, long j) const {
    const long width = least(kPanel, columns - j), x_row = x_stride(args);
    const float* x = x_at(args, 0, column + j);
    float* sums = work.sums + i * kSumStride + j;
    copy_row(weight_row(i) + j, args.accumulate ? width : 0, sums, kPanel);
    for (long p = 0; p < args.m; ++p) {
      const float grad = args.grad[p * args.grad_stride + row + i];
      for (long c = 0; c < width; ++c) sums[c] += grad * x[p * x_row + c];
    }
  }

  void run() const {
    if (args.accumulate)
      for (long i = 0; i < rows; ++i)
        copy_row(weight_row(i), columns, work.sums + i * kSumStride, round_up(columns, kPanel));
    P::enter();
    for (long p = 0; p < args.m; p += kDepth) {
      const long depth = least(kDepth, args.m - p);
      take_grad(p, depth);
      multiply(p, depth, args.accumulate || p > 0);
    }
    P::leave();
    for (long i = 0; i < rows; ++i) {
      float* sums = work.sums + i * kSumStride;
      for (long j = 0; j < columns; j += kPanel)
        if (P::is_odd(load(sums + j), load(sums + j + kLanes))) plain(i, j);
      copy_row(sums, columns, weight_row(i), columns);
    }
  }
};

}  // namespace

long split_weight_gradient_x_bytes(long m, long k) {
  return round_up(k, kPanel) / kPanel * P::panel_size(m) * static_cast<long>(sizeof(Operand));
}

void split_weight_gradient_x(const WeightGradientArgs& args, void* pieces, long begin, long end) {
  for (long block = begin; block < end; ++block) {
    const long p = block * kPairDepth, depth = least(kPairDepth, args.m - p);
    for (long pair = 0; pair < kPairDepth / 2; ++pair) {
      auto* to = static_cast<Operand*>(pieces) + P::panel_size(p);
      for (long j = 0; j < args.k; j += kPanel, to += P::panel_size(args.m))
        split_pair(x_at(args, p, j), x_stride(args), least(kPanel, args.k - j), depth, pair, to);
    }
  }
}

long split_weight_gradient_rows() { return kRowBlock; }
long split_weight_gradient_columns() { return kColumnBlock; }
long split_weight_gradient_scratch() { return Workspace(nullptr).bytes; }

void split_weight_gradient(const WeightGradientArgs& args, long row_begin, long row_end,
                           long column_begin, long column_end, void* scratch) {
  Block{args,         Workspace(scratch),       row_begin, row_end - row_begin,
        column_begin, column_end - column_begin}
      .run();
}

}  // namespace tf::TF_ISA
