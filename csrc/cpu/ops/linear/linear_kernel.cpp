// Linear layer with epilogue in fp32. A block of rows is packed once; the weights are streamed in
// panels.
#include "cpu/gemm/gemm.h"
#include "cpu/ops/linear/linear.h"
#include "cpu/simd/activation.h"

namespace tf::TF_ISA {
namespace {

constexpr long kRowBlock = 8 * kTileRows;
constexpr long kDepth = 2048;  // columns of A in scratch at a time

const float* floats(const void* place) { return static_cast<const float*>(place); }
float* floats(void* place) { return static_cast<float*>(place); }

// Activation and residual of a block that is still in cache; stores the preactivation if wanted.
void finish(const LinearArgs& args, float* c, long c_stride, long row, long rows, long column,
            long columns) {
  if (args.activation > kRelu || args.preactivation != nullptr) {
    for (long i = 0; i < rows; ++i) {
      float* r = c + i * c_stride;
      if (args.preactivation != nullptr)
        copy_row(r, columns, floats(args.preactivation) + (row + i) * args.n + column, columns);
      long j = 0;
      for (; j + kLanes <= columns; j += kLanes)
        store(r + j, activate(load(r + j), args.activation));
      if (j < columns)
        store_n(r + j, activate(load_n(r + j, columns - j), args.activation), columns - j);
    }
  }
  if (args.residual != nullptr) {
    for (long i = 0; i < rows; ++i) {
      float* r = c + i * c_stride;
      const float* add = floats(args.residual) + (row + i) * args.residual_stride + column;
      long j = 0;
      for (; j + kLanes <= columns; j += kLanes) store(r + j, load(r + j) + load(add + j));
      for (; j < columns; ++j) r[j] += add[j];
    }
  }
}

#if defined(__AVX512F__)
constexpr int kDirectColumns = 4, kDirectRows = 4;  // 16 accumulators of 32 registers
#else
constexpr int kDirectColumns = 2, kDirectRows = 4;  // 8 of 16
#endif

// kRows rows of x times kColumns rows of W.
template <int kRows, int kColumns>
void dot_products(const LinearArgs& args, long row, long column) {
  Vec sum[kRows][kColumns];
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kColumns; ++j) sum[i][j] =
      zero();
  const float* x = floats(args.x) + row * args.x_stride;
  const float* w = floats(args.weight) + column * args.weight_stride;
  const auto step = [&](long p, const auto& read) __attribute__((always_inline)) {
    Vec b[kColumns];
    TF_UNROLL for (int j = 0; j < kColumns; ++j) b[j] = read(w + j * args.weight_stride + p);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      const Vec a = read(x + i * args.x_stride + p);
      TF_UNROLL for (int j = 0; j < kColumns; ++j) sum[i][j] = fma(a, b[j], sum[i][j]);
    }
  };
  long p = 0;
  for (; p + kLanes <= args.k; p += kLanes) {
    // Prefetches the rows after the ones being read.
    TF_UNROLL for (int j = 0; j < kColumns; ++j) _mm_prefetch(
        reinterpret_cast<const char*>(w + (j + kColumns) * args.weight_stride + p), _MM_HINT_T1);
    step(p, [](const float* from) { return load(from); });
  }
  if (p < args.k) step(p, [&](const float* from) { return load_n(from, args.k - p); });
  const bool relu = args.activation == kRelu && args.preactivation == nullptr;
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kColumns; ++j) {
    float y = reduce_add(sum[i][j]);
    if (args.bias != nullptr) y += floats(args.bias)[column + j];
    if (relu) y = y < 0.0f ? 0.0f : y;  // propagates NaN
    floats(args.y)[(row + i) * args.y_stride + column + j] = y;
  }
}

template <int kColumns>
void direct_columns(const LinearArgs& args, long column) {
  for (long row = 0; row < args.m; row += kDirectRows) {
    switch (min(args.m - row, kDirectRows)) {
      case 1:
        dot_products<1, kColumns>(args, row, column);
        break;
      case 2:
        dot_products<2, kColumns>(args, row, column);
        break;
      case 3:
        dot_products<3, kColumns>(args, row, column);
        break;
      default:
        dot_products<4, kColumns>(args, row, column);
    }
  }
}

// A packed block of rows in scratch.
struct Block {
  const LinearArgs& args;
  long a_stride;
  float *a, *edge, *edge_bias;  // edge: a whole panel where y has fewer columns

  Block(const LinearArgs& call, float* scratch)
      : args(call),
        a_stride(kPackedRows * round_up(min(call.k, kDepth), kLanes)),
        a(scratch),
        edge(a + kRowBlock / kTileRows * a_stride),
        edge_bias(edge + kRowBlock * kPanel) {}

  // Rows of y from `row` on, with the columns of A from `depth` on, which are packed in `a`.
  void panels(long row, long rows, long depth, long k, long begin, long end) const {
    const bool first = depth == 0, last = depth + k >= args.k;
    for (long p = begin; p < end; ++p) {
      const long column = p * kPanel, columns = min(kPanel, args.n - column);
      const float* panel = floats(args.packed) + column * args.k + depth * kPanel;
      const float* next = panel + kPanel * args.k;
      float* y = floats(args.y) + row * args.y_stride + column;
      const float* bias = args.bias != nullptr && first ? floats(args.bias) + column : nullptr;
      const bool relu = last && args.activation == kRelu && args.preactivation == nullptr;
      if (columns == kPanel) {
        panel_rows<Form::packed>(a, a_stride, rows, panel, k, y, args.y_stride, columns,
                                 {bias, !first, relu}, next);
      } else {
        if (bias != nullptr) copy_row(bias, columns, edge_bias, kPanel);
        if (!first)
          for (long i = 0; i < rows; ++i)
            copy_row(y + i * args.y_stride, columns, edge + i * kPanel, kPanel);
        panel_rows<Form::packed>(a, a_stride, rows, panel, k, edge, kPanel, columns,
                                 {bias != nullptr ? edge_bias : nullptr, !first, relu}, next);
        for (long i = 0; i < rows; ++i)
          copy_row(edge + i * kPanel, columns, y + i * args.y_stride, columns);
      }
      if (last) finish(args, y, args.y_stride, row, rows, column, columns);
    }
  }
};

// The columns from begin on as far as they are whole groups of kColumns; returns the next column.
template <int kColumns>
long direct_groups(const LinearArgs& args, long begin, long end) {
  for (; begin + kColumns <= end; begin += kColumns) direct_columns<kColumns>(args, begin);
  return begin;
}

void direct(const LinearArgs& args, long begin, long end) {
  long column = begin;
#if defined(__AVX512F__)
  // One row of x leaves little to compute: what counts is how W is read. The hardware prefetches
  // short rows best one after the other; longer ones (than a page) need more software prefetches in
  // flight, for which the registers of one or two rows of x have room.
  constexpr long kShortRow = 1024;
  if (args.m == 1 && args.k <= kShortRow) column = direct_groups<1>(args, column, end);
  if (args.m <= 2) column = direct_groups<2 * kDirectColumns>(args, column, end);
#endif
  column = direct_groups<kDirectColumns>(args, column, end);
  direct_groups<1>(args, column, end);
  finish(args, floats(args.y) + begin, args.y_stride, 0, args.m, begin, end - begin);
}

long packed_bytes(long n, long k) {
  return round_up(n, kPanel) * k * static_cast<long>(sizeof(float));
}

void pack(const void* weight, long stride, long n, long k, void* packed, long begin, long end) {
  for (long p = begin; p < end; ++p) {
    const long row = p * kPanel;
    pack_rows(floats(weight) + row * stride, stride, min(kPanel, n - row), k,
              floats(packed) + row * k);
  }
}

void pack_transposed(const void* transposed, long stride, long n, long k, void* packed, long begin,
                     long end) {
  for (long j = 0; j < k; ++j)
    for (long p = begin; p < end; ++p)
      copy_row(floats(transposed) + j * stride + p * kPanel, min(kPanel, n - p * kPanel),
               floats(packed) + (p * k + j) * kPanel, kPanel);
}

long row_block(const LinearArgs&) { return kRowBlock; }

long scratch_floats(const LinearArgs& args) {
  return kRowBlock / kTileRows * kPackedRows * round_up(min(args.k, kDepth), kLanes) +
         kRowBlock * kPanel + kPanel;
}

long scratch_bytes(const LinearArgs& args) {
  return scratch_floats(args) * static_cast<long>(sizeof(float));
}

long panels_scratch(const LinearArgs& args) {
  return scratch_bytes(args) + kPanel * kKBlock * static_cast<long>(sizeof(float));
}

void fill(const LinearArgs& args, void* scratch) {
  const Block block(args, floats(scratch));
  pack_a(floats(args.x), args.x_stride, args.m, args.k, block.a, block.a_stride);
}

void panels(const LinearArgs& args, long panel_begin, long panel_end, void* scratch) {
  LinearArgs packed = args;
  Block block(packed, floats(scratch));
  if (args.packed != nullptr) return block.panels(0, args.m, 0, args.k, panel_begin, panel_end);
  float* part = floats(scratch) + scratch_floats(args);
  for (long p = panel_begin; p < panel_end; ++p) {
    const long row = p * kPanel;
    const float* weight = floats(args.weight) + row * args.weight_stride;
    for (long depth = 0; depth < args.k; depth += kKBlock) {
      const long k = min(kKBlock, args.k - depth);
      pack_rows(weight + depth, args.weight_stride, min(kPanel, args.n - row), k, part);
      packed.packed = part - row * args.k - depth * kPanel;
      block.a = floats(scratch) + depth * kPackedRows;
      block.panels(0, args.m, depth, k, p, p + 1);
    }
  }
}

void blocks(const LinearArgs& args, long row_begin, long row_end, long panel_begin, long panel_end,
            void* scratch) {
  const Block block(args, floats(scratch));
  const long count = (row_end - row_begin + kRowBlock - 1) / kRowBlock;
  for (long item = 0, row = row_begin; item < count; ++item) {
    const long rows = (row_end - row + count - item - 1) / (count - item);
    long depth = 0;
    do {
      const long k = min(kDepth, args.k - depth);
      pack_a(floats(args.x) + row * args.x_stride + depth, args.x_stride, rows, k, block.a,
             block.a_stride);
      block.panels(row, rows, depth, k, panel_begin, panel_end);
      depth += k;
    } while (depth < args.k);
    row += rows;
  }
}

constexpr LinearKernels kKernels{.in_fp32 = true,
                                 .layout = kPanel,
                                 .panel = kPanel,
                                 .row_unit = 1,
                                 .pack_transposed_rows = 0,
                                 .packed_bytes = packed_bytes,
                                 .pack = pack,
                                 .pack_transposed = pack_transposed,
                                 .row_block = row_block,
                                 .scratch = scratch_bytes,
                                 .block = blocks,
                                 .max_depth = kDepth,
                                 .min_panels = 0,
                                 .panels_scratch = panels_scratch,
                                 .fill = fill,
                                 .panels = panels,
                                 .direct_unit = 1,
                                 .direct = direct};

}  // namespace

const LinearKernels* linear_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
