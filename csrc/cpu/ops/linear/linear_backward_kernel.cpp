// Weight gradients in fp32: X is packed into panels once, then a block of dW stays in the
// second-level cache while all rows are read, kDepth at a time. The columns of dY are the rows of
// the left operand, so copying kTileRows of them side by side gives Form::packed.
#include "cpu/gemm/gemm.h"
#include "cpu/ops/linear/linear.h"
#include "cpu/simd/activation_slope.h"
#include "cpu/simd/column_sums.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

constexpr long kRowBlock = 252;  // a multiple of kTileRows, whatever the instruction set
constexpr long kColumnBlock = 512;
constexpr long kDepth = kKBlock;
constexpr long kPad = 16;  // avoids cache set conflicts of tiles and panels
constexpr long kTileStride = kPackedRows * kDepth + kPad;
constexpr long kSumStride = kColumnBlock + kPad;

struct Workspace {
  float *tiles, *sums;
  long floats = 0;

  explicit Workspace(float* scratch) {
    const auto take = [&](long count) {
      float* place = scratch != nullptr ? scratch + floats : nullptr;
      floats += round_up(count, 16);
      return place;
    };
    tiles = take((kRowBlock / kTileRows + 1) * kTileStride);
    sums = take(kRowBlock * kSumStride);
  }
};

// Prefetches rows of a matrix into the second-level cache, some lines per call.
struct Fetch {
  const char* row;
  long stride, lines, rows;  // bytes between rows, lines per row, rows left
  long at = 0;

  TF_INLINE void some(long count) {
    while (count > 0 && rows > 0) {
      const long here = min(count, lines - at);
      for (long i = 0; i < here; ++i) _mm_prefetch(row + (at + i) * kLine, _MM_HINT_T1);
      count -= here;
      at += here;
      if (at == lines) {
        at = 0;
        row += stride;
        --rows;
      }
    }
  }
};

TF_INLINE long panel_stride(const WeightGradientArgs& args) {
  return weight_gradient_panel_stride(args.m);
}

struct Block {
  const WeightGradientArgs& args;
  const Workspace work;
  long row, rows, column, columns;

  // Rows [p, p + depth) of dY.
  void take_grad(long p, long depth) const {
    for (long u = 0; u < depth; ++u) {
      const float* from = static_cast<const float*>(args.grad) + (p + u) * args.grad_stride + row;
      each_tile(rows, [&](long t, long i, long) {
        TF_UNROLL for (int v = 0; v < kPackedRows; v += kLanes) {
          const long have = rows - i - v;
          store(work.tiles + t * kTileStride + u * kPackedRows + v,
                have > 0 ? load_some(from + i + v, have) : zero());
        }
      });
    }
  }

  void multiply(long p, long depth) const {
    const long tiles = (rows + kTileRows - 1) / kTileRows, panels = (columns + kPanel - 1) / kPanel;
    const long step = kPanel * static_cast<long>(sizeof(float)) / tiles;
    const long next = p + depth;
    Fetch fetch{.row = reinterpret_cast<const char*>(static_cast<const float*>(args.grad) +
                                                     next * args.grad_stride + row),
                .stride = args.grad_stride * static_cast<long>(sizeof(float)),
                .lines = rows * static_cast<long>(sizeof(float)) / kLine + 1,
                .rows = min(kDepth, args.m - next)};
    const long share = fetch.lines * fetch.rows / (tiles * panels) + 1;
    for (long j = 0; j < columns; j += kPanel) {
      const float* panel = static_cast<const float*>(args.panels) +
                           (column + j) / kPanel * panel_stride(args) + p * kPanel;
      const char* ahead = reinterpret_cast<const char*>(panel + panel_stride(args));
      const TileFunction* functions = kTiles<Form::packed>[columns - j > kLanes ? 1 : 0];
      each_tile(rows, [&](long t, long i, long count) {
        fetch.some(share);
        functions[count - 1](work.tiles + t * kTileStride, 0, panel, depth,
                             work.sums + i * kSumStride + j, kSumStride, {nullptr, true, false},
                             {ahead, step});
        ahead += depth * step;
      });
    }
  }

  float* weight_row(long i) const {
    return static_cast<float*>(args.grad_weight) + (row + i) * args.k + column;
  }

  void run() const {
    for (long i = 0; i < rows; ++i)
      copy_row(weight_row(i), args.first ? 0 : columns, work.sums + i * kSumStride,
               round_up(columns, kPanel));
    for (long p = 0; p < args.m; p += kDepth) {
      const long depth = min(kDepth, args.m - p);
      take_grad(p, depth);
      multiply(p, depth);
    }
    for (long i = 0; i < rows; ++i)
      copy_row(work.sums + i * kSumStride, columns, weight_row(i), columns);
  }
};

template <class T>
void slope_rows(const SlopeArgs& args, long begin, long end) {
  const long n = args.n;
  for (long i = begin; i < end; ++i) {
    const T* grad = static_cast<const T*>(args.grad) + i * args.grad_stride;
    const T* z = static_cast<const T*>(args.z) + i * n;
    T* to = static_cast<T*>(args.to) + i * n;
    for (long j = 0; j < n; j += kLanes) {
      Vec x = load_some(z + j, n - j);
      const Vec y = activation_backward(load_some(grad + j, n - j), x, args.activation);
      store_some(to + j, y, n - j);
    }
  }
}

void bias_gradient(const WeightGradientArgs& args, long begin, long end) {
  column_sums(static_cast<const float*>(args.grad) + begin, args.grad_stride, args.m, end - begin,
              !args.first, static_cast<float*>(args.grad_bias) + begin);
}

long panels_bytes(long m, long k) {
  return ((k + kPanel - 1) / kPanel * weight_gradient_panel_stride(m) + kDepth * kPanel) *
         static_cast<long>(sizeof(float));
}

void pack_x(const WeightGradientArgs& args, void* panels, long begin, long end, void* scratch) {
  float* factors = static_cast<float*>(scratch);
  for (long i = begin; i < end; ++i) {
    const float* from = static_cast<const float*>(args.x) + i * args.x_stride;
    if (args.dropout.on)
      dropout_factors(args.dropout, static_cast<uint64_t>(args.row + i), 0, args.k, factors);
    for (long j = 0; j < args.k; j += kPanel) {
      float* to = static_cast<float*>(panels) + weight_gradient_place(args.m, i, j);
      TF_UNROLL for (int v = 0; v < kPanel; v += kLanes) {
        const long have = args.k - j - v;
        Vec x = have > 0 ? load_some(from + j + v, have) : zero();
        if (args.activation != kIdentity) x = activate(x, args.activation);
        if (args.dropout.on) x = drop(x, load(factors + j + v));
        store(to + v, x);
      }
    }
  }
}

long scratch_bytes(const WeightGradientArgs& args) {
  return max(Workspace(nullptr).floats, args.dropout.on ? args.k + kPanel : 0) *
         static_cast<long>(sizeof(float));
}

void weight_gradient(const WeightGradientArgs& args, long row_begin, long row_end,
                     long column_begin, long column_end, void* scratch) {
  const Block block{.args = args,
                    .work = Workspace(static_cast<float*>(scratch)),
                    .row = row_begin,
                    .rows = row_end - row_begin,
                    .column = column_begin,
                    .columns = column_end - column_begin};
  block.run();
}

constexpr WeightGradientKernels kKernels{.pack_rows = 1,
                                         .packed_bytes = panels_bytes,
                                         .pack = pack_x,
                                         .rows = kRowBlock,
                                         .columns = kColumnBlock,
                                         .scratch = scratch_bytes,
                                         .block = weight_gradient,
                                         .bias = bias_gradient};

}  // namespace

const WeightGradientKernels* weight_gradient_kernels() { return &kKernels; }

void multiply_by_slope(const SlopeArgs& args, long begin, long end) {
  dispatch_element(args.type, [&](auto type) { slope_rows<decltype(type)>(args, begin, end); });
}

}  // namespace tf::TF_ISA
