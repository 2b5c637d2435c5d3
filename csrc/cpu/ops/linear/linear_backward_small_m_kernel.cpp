// Products and gradients of linear layers from unpacked operands, by register tiles of sums. On the
// GEMM engine, packing makes the gradient of the input take 1.25 times as long for 64 rows,
// 256 -> 1024, and that of the weight 1.3 times (AVX-512).
#include "cpu/gemm/gemm.h"
#include "cpu/ops/linear/linear_product.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

#if TF_VECTOR_REGISTERS == 32
constexpr int kRows = 6, kVecs = 4;  // 24 sums
#else
constexpr int kRows = 4, kVecs = 2;  // 8 sums
#endif
constexpr Index kColumns = kVecs * kLanes;
constexpr Index kLargeGradient = 1 << 22;  // values: 16 MiB
constexpr Index kCacheLine = 16;           // values

// kVecs vectors of a row, `left` values of which are valid.
template <bool kWhole>
TF_INLINE void read(const float* from, Index left, Vec (&to)[kVecs]) {
  TF_UNROLL for (int v = 0; v < kVecs; ++v) {
    if constexpr (kWhole) {
      to[v] = load(from + v * kLanes);
    } else {
      to[v] = left > v * kLanes ? load_some(from + v * kLanes, left - v * kLanes) : zero();
    }
  }
}

// Operands of a register tile: sums[i] (kCount rows of kColumns, `columns` of them valid) = sum
// over p < depth of left[i * left_row + p * left_step] times row p of right.
struct Tile {
  const float *left, *right;
  float* sums;
  Index left_row, left_step, right_stride, sums_stride, depth, columns;
  bool accumulate;        // add to sums
  bool ahead = false;     // prefetch the rows of right
  bool uncached = false;  // store the sums past the caches: aligned, of whole vectors
};

template <int kCount, bool kWhole>
void tile(const Tile& t) {
  Vec sum[kCount][kVecs];
  TF_UNROLL for (int i = 0; i < kCount; ++i) TF_UNROLL for (int v = 0; v < kVecs; ++v) sum[i][v] =
      zero();
  const float *left = t.left, *right = t.right;
  const Index left_row = t.left_row, left_step = t.left_step, right_stride = t.right_stride;
  // Rows are far apart: hardware does not prefetch them.
  const Index ahead = t.ahead ? 12 * right_stride : 0;
  for (Index p = 0; p < t.depth; ++p, left += left_step, right += right_stride) {
    Vec b[kVecs];
    TF_UNROLL for (int v = 0; v < kVecs; ++v) prefetch_l1(right + ahead + v * kLanes);
    read<kWhole>(right, t.columns, b);
    TF_UNROLL for (int i = 0; i < kCount; ++i) {
      const Vec a = set1(left[i * left_row]);
      TF_UNROLL for (int v = 0; v < kVecs; ++v) sum[i][v] = fma(a, b[v], sum[i][v]);
    }
  }
  TF_UNROLL for (int i = 0; i < kCount; ++i) {
    float* to = t.sums + i * t.sums_stride;
    if (t.accumulate) {
      Vec before[kVecs];
      read<kWhole>(to, t.columns, before);
      TF_UNROLL for (int v = 0; v < kVecs; ++v) sum[i][v] = sum[i][v] + before[v];
    }
    TF_UNROLL for (int v = 0; v < kVecs; ++v) {
      if (t.uncached) {
        if (t.columns > v * kLanes) store_uncached(to + v * kLanes, sum[i][v]);
      } else if constexpr (kWhole) {
        store(to + v * kLanes, sum[i][v]);
      } else if (t.columns > v * kLanes) {
        store_some(to + v * kLanes, sum[i][v], t.columns - v * kLanes);
      }
    }
  }
}

template <bool kWhole>
void tile_of(Index rows, const Tile& t) {
  switch (rows) {
    case 1:
      return tile<1, kWhole>(t);
    case 2:
      return tile<2, kWhole>(t);
    case 3:
      return tile<3, kWhole>(t);
#if TF_VECTOR_REGISTERS == 32
    case 4:
      return tile<4, kWhole>(t);
    case 5:
      return tile<5, kWhole>(t);
#endif
    default:
      return tile<kRows, kWhole>(t);
  }
}

// All rows of a strip of columns.
TF_INLINE void strip(Index rows, Tile t) {
  while (rows > 0) {
    // The last two tiles have about the same height: in a tile of few rows, each sum waits.
    const Index count = rows <= kRows ? rows : rows < 2 * kRows ? (rows + 1) / 2 : kRows;
    (t.columns >= kColumns ? tile_of<true> : tile_of<false>)(count, t);
    rows -= count;
    t.left += count * t.left_row;
    t.sums += count * t.sums_stride;
    t.ahead = false;  // they are in cache now
  }
}

}  // namespace

Index small_m_columns() { return kColumns; }

Index linear_strip_floats(Index rows) { return kColumns * (kKBlock + rows); }

void linear_strip(const LinearArgs& args, Index row, Index rows, Index column, float* scratch) {
  const auto* weight = static_cast<const float*>(args.weight) + column * args.weight_stride;
  const Index columns = min(kColumns, args.n - column);
  float* sums = scratch + kKBlock * kColumns;
  for (Index p = 0; p < args.k; p += kKBlock) {
    const Index depth = min(kKBlock, args.k - p), whole = depth / kLanes * kLanes;
    for (Index j = 0; j < kColumns; j += kLanes) {
      const float* from = weight + j * args.weight_stride + p;
      const Index have = max(0, min(kLanes, columns - j));
      for (Index q = 0; q < whole; q += kLanes)
        transpose_rows(from + q, args.weight_stride, have, scratch + q * kColumns + j, kColumns);
      for (Index q = whole; q < depth; ++q)
        for (Index i = 0; i < kLanes; ++i)
          scratch[q * kColumns + j + i] = i < have ? from[i * args.weight_stride + q] : 0.0f;
    }
    const float* x = static_cast<const float*>(args.x) + row * args.x_stride + p;
    strip(rows, {x, scratch, sums, args.x_stride, 1, kColumns, kColumns, depth, kColumns, p > 0});
  }
  const RowEpilogue<float, FloatProduct<float>> row_epilogue(args, row);
  for (Index panel = column / kPanel; panel * kPanel < column + columns; ++panel) {
    const Epilogue<float> epilogue = row_epilogue.of_panel(panel);
    const float* from = sums + panel * kPanel - column;
    for (Index i = 0; i < rows; ++i, from += kColumns)
      row_epilogue.finish_checked(epilogue, i, panel, load(from), load(from + kLanes));
  }
}

void small_m_input_gradient(const SmallMInputArgs& args, Index begin, Index end, float* scratch) {
  constexpr Index kPart = kPartRows / kKBlock * kKBlock;
  for (Index column = begin; column < end; column += kColumns) {
    float* result = args.grad_input + column;
    for (Index n = 0; n < args.n; n += kKBlock) {  // a block of W stays in cache for all rows
      const bool apart = n >= kPart;  // the sum of a part, which is added to the result
      strip(args.m, {.left = args.grad + n,
                     .right = args.weight + n * args.weight_stride + column,
                     .sums = apart ? scratch : result,
                     .left_row = args.grad_stride,
                     .left_step = 1,
                     .right_stride = args.weight_stride,
                     .sums_stride = apart ? kColumns : args.k,
                     .depth = min(kKBlock, args.n - n),
                     .columns = end - column,
                     .accumulate = n % kPart > 0,
                     .ahead = true});
      if (!apart || ((n + kKBlock) % kPart > 0 && n + kKBlock < args.n)) continue;
      for (Index i = 0; i < args.m; ++i)
        for (Index j = 0; j < min(kColumns, end - column); ++j)
          result[i * args.k + j] += scratch[i * kColumns + j];
    }
  }
}

// For up to kUncopied rows of X, writing dW takes most of the time: some rows of dW at a time are
// written from end to end. For more, a block of a strip of X is copied to adjacent memory in the L1
// cache, and multiplied by all columns of dY: 1.1 times as fast for 256 rows, 512 -> 512.
void small_m_weight_gradient(const WeightGradientArgs& args, Index begin, Index end) {
  constexpr Index kUncopied = 64, kCopied = 128;
  const bool copies = args.m > kUncopied;
  const Index rows = copies ? end - begin : kVecs == 4 && args.m > 32 ? 4 * kRows : kRows;
  const auto* grad = static_cast<const float*>(args.grad);
  const auto* x = static_cast<const float*>(args.x);
  auto* to = static_cast<float*>(args.grad_weight);
  // A store to memory that is not cached reads it first: half of the time of a large gradient.
  const bool uncached = !copies && args.n * args.k >= kLargeGradient && args.k % kCacheLine == 0 &&
                        reinterpret_cast<uintptr_t>(to) % 64 == 0;
  alignas(64) float copy[kCopied * kColumns];
  for (Index row = begin; row < end; row += rows)
    for (Index column = 0; column < args.k; column += kColumns)
      for (Index m = 0; m < args.m; m += kCopied) {
        Tile t{.left = grad + m * args.grad_stride + row,
               .right = x + m * args.x_stride + column,
               .sums = to + row * args.k + column,
               .left_row = 1,
               .left_step = args.grad_stride,
               .right_stride = args.x_stride,
               .sums_stride = args.k,
               .depth = min(kCopied, args.m - m),
               .columns = args.k - column,
               .accumulate = m > 0,
               .uncached = uncached};
        if (copies) {
          const Index count = min(kColumns, t.columns);
          for (Index p = 0; p < t.depth; ++p)
            copy_row(t.right + p * args.x_stride, count, copy + p * kColumns, kColumns);
          t.right = copy;
          t.right_stride = kColumns;
        }
        strip(min(rows, end - row), t);
      }
  if (uncached) finish_uncached_stores();
}

namespace {

template <class T>
void hidden_rows(const HiddenBackwardArgs& args, Index begin, Index end, float* scratch) {
  const auto* z = static_cast<const T*>(args.z);
  T *grads = static_cast<T*>(args.grad), *hidden = static_cast<T*>(args.hidden);
  for (Index row = begin; row < end; ++row) {
    if (args.dropout.on)
      dropout_factors(args.dropout, static_cast<uint64_t>(row), 0, args.f, scratch);
    for (Index j = 0; j < args.f; j += kLanes) {
      const Index place = row * args.f + j, left = args.f - j;
      const auto dropped = [&](Vec x) { return args.dropout.on ? drop(x, load(scratch + j)) : x; };
      Vec h = load_some(z + place, left);
      const Vec grad = dropped(load_some(grads + place, left));
      store_some(grads + place, activation_backward(grad, h, args.activation), left);
      if (hidden != nullptr) store_some(hidden + place, dropped(h), left);
    }
  }
}

}  // namespace

void hidden_backward(const HiddenBackwardArgs& args, Index begin, Index end, float* scratch) {
  if (args.type == Element::float32) return hidden_rows<float>(args, begin, end, scratch);
  (args.type == Element::bfloat16 ? hidden_rows<BFloat16> : hidden_rows<Float16>)(args, begin, end,
                                                                                  scratch);
}

}  // namespace tf::TF_ISA
