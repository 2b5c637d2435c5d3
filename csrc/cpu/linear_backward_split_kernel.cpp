// Weight gradients of fp32 in pieces: a block of dW stays in the second-level cache while all rows
// pass by, kDepth at a time. dY's rows are turned when they are split; a panel of X is split while
// the one before is multiplied.
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
  Operand *grad, *panel[2];
  float* sums;
  long bytes = 0;

  explicit Workspace(void* scratch) {
    const auto take = [&](auto*& place, long count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<long>(sizeof(*place)), 64);
    };
    take(grad, P::block_size(kRowBlock, kDepth));
    take(panel[0], P::panel_size(kDepth));
    take(panel[1], P::panel_size(kDepth));
    take(sums, kRowBlock * kSumStride);
  }
};

struct Block {
  const WeightGradientArgs& args;
  const Workspace work;
  long row, rows, column, columns;

  // Rows [p, p + depth) of dY, turned: 16 of its columns and kPairDepth rows make a tile.
  void take_grad(long p, long depth) const {
    for (long i = 0; i < rows; i += kTile) {
      const float* from = args.grad + p * args.grad_stride + row + i;
      for (long u = 0; u < depth; u += kPairDepth) {
        float block[kSplitPieces][kTile * kTile];
        const auto read = [&](long v) __attribute__((always_inline)) {
          if (u + v >= depth) return zero();
          const float* at = from + (u + v) * args.grad_stride;
          return rows - i >= kTile ? load(at) : load_n(at, rows - i);
        };
        for (long j = 0; j < kTile; ++j) {
          __m512i low[kSplitPieces], high[kSplitPieces];
          split(read(j), low);
          split(read(kTile + j), high);
          TF_UNROLL for (int k = 0; k < kSplitPieces; ++k)
              _mm512_storeu_si512(block[k] + j * kTile, pairs(low[k], high[k]));
        }
        float* tile = reinterpret_cast<float*>(P::chunk(work.grad, kDepth, i, u));
        for (int k = 0; k < kSplitPieces; ++k)
          transpose_rows(block[k], kTile, kTile, tile + k * kTile * kTile, kTile);
      }
    }
  }

  // X from row p and column j of the block on.
  const float* x_at(long p, long j) const {
    return reads_x(args) ? args.x + p * args.x_stride + column + j
                         : args.panels + weight_gradient_place(args.m, p, column + j);
  }
  long x_stride() const { return reads_x(args) ? args.x_stride : kPanel; }

  // The products of rows [p, p + depth), added to what is there if `onto`.
  void multiply(long p, long depth, bool onto) const {
    const long x_row = x_stride(), blocks = pair_depth(depth) / 2;
    split_pair_columns(x_at(p, 0), x_row, least(kPanel, columns), depth, work.panel[0]);
    for (long j = 0, slot = 0; j < columns; j += kPanel, slot = 1 - slot) {
      const long left = columns - j - kPanel;  // behind this panel
      const float* next = left > 0 ? x_at(p, j + kPanel) : nullptr;
      const long width = least(kPanel, left);
      Operand* to = work.panel[1 - slot];
      long done = left > 0 ? 0 : blocks;
      P::multiply_to(work.grad, kDepth, rows, depth, work.panel[slot], onto, work.sums + j,
                     kSumStride, [&]() __attribute__((always_inline)) {
                       if (done < blocks) split_pair(next, x_row, width, depth, done++, to);
                     });
      for (; done < blocks; ++done) split_pair(next, x_row, width, depth, done, to);
    }
  }

  float* weight_row(long i) const { return args.grad_weight + (row + i) * args.k + column; }

  // kPanel columns of a row of the result by fp32 FMA, for numbers that have no pieces.
  void plain(long i, long j) const {
    const long width = least(kPanel, columns - j), x_row = x_stride();
    const float* x = x_at(0, j);
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
