// Weight gradients of a linear layer, dW = dY^T X on the GEMM engine (engine.h): the fp32 sums of a
// block of dW stay in the second-level cache while all rows of dY and X are read, kDepth at a time.
// dY is transposed as it is packed.
#include "cpu/gemm/engine.h"
#include "cpu/ops/linear/linear_product.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/column_sums.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

template <class T>
class WeightGradientBlock {
  using P = PackedProduct<T>;
  using Operand = typename P::Operand;

 public:
  // Maximum size of the block of dW. With FMA, packing dY again costs more than reading X again.
  static constexpr bool kIsFma = std::is_same_v<Operand, float>;
  static constexpr Index kRows = kIsFma ? 112 : 256, kColumns = kIsFma ? 1024 : 512;

  static Index scratch_bytes() {
    return P::block_size(kRows, kDepth) * static_cast<Index>(sizeof(Operand)) +
           kRows * kSumStride * static_cast<Index>(sizeof(float));
  }

  // grad: dY (m, n), rows grad_stride apart. panels: X in panels of its columns. The block is
  // `rows` rows from `row` on and `columns` columns from `column` (a multiple of kPanel) on.
  WeightGradientBlock(const T* grad, Index grad_stride, Index m, const void* panels, Index row,
                      Index rows, Index column, Index columns, void* scratch)
      : grad_(grad + row),
        grad_stride_(grad_stride),
        m_(m),
        rows_(rows),
        columns_(columns),
        panels_(static_cast<const Operand*>(panels) + column / kPanel * P::panel_size(m)),
        packed_grad_(static_cast<Operand*>(scratch)),
        sums_(reinterpret_cast<float*>(packed_grad_ + P::block_size(kRows, kDepth))) {}

  // kColumns floats: the sums of the block, followed by padding.
  float* sums(Index row) const { return sums_ + row * kSumStride; }

  // Whether all rows fit in one step, as multiply_at_once() requires.
  static bool is_one_part(Index m) { return m <= kDepth; }

  // Calls sink(i, j, low, high) with row i and the kPanel columns from j on of dY^T X; the last
  // ones may lie beyond the block.
  template <class Sink>
  void multiply_at_once(const Sink& sink) const {
    P::enter();
    take_grad(0, m_, m_);
    for (Index j = 0; j < columns_; j += kPanel) {
      const Operand* panel = panels_ + j / kPanel * P::panel_size(m_);
      P::multiply(packed_grad_, rows_, m_, panel, panel + P::panel_size(m_), sums_,
                  [&](Index i, Vec low, Vec high)
                      __attribute__((always_inline)) { sink(i, j, low, high); });
    }
    P::leave();
  }

  // sums = dY^T X, or sums += dY^T X.
  void multiply(bool accumulate) const {
    P::enter();
    for (Index p = 0; p < m_; p += kDepth) {
      const Index depth = min(kDepth, m_ - p);
      take_grad(p, depth, kDepth);
      multiply_part(p, depth, accumulate || p > 0);
    }
    P::leave();
  }

 private:
  static constexpr Index kDepth = P::kKBlock;
  static constexpr Index kSumStride = kColumns + 16;  // not a power of two

  // Packs rows [p, p + depth) of dY transposed, in a block of depth `block_depth`.
  void take_grad(Index p, Index depth, Index block_depth) const {
    P::fill_transposed(grad_ + p * grad_stride_, grad_stride_, depth, rows_, packed_grad_,
                       block_depth);
  }

  void multiply_part(Index p, Index depth, bool accumulate) const {
    const Index size = P::panel_size(m_), calls = P::steps(rows_, depth);
    const Index bytes = P::panel_size(depth) * static_cast<Index>(sizeof(Operand));
    for (Index j = 0; j < columns_; j += kPanel) {
      const Operand* panel = panels_ + j / kPanel * size + P::panel_size(p);
      FetchAhead fetch(panel + size, bytes, calls);
      P::multiply_to(
          packed_grad_, kDepth, rows_, depth, panel, accumulate, sums_ + j, kSumStride,
          [&]() __attribute__((always_inline)) { fetch(); }, panel + size);
    }
  }

  const T* grad_;
  Index grad_stride_, m_, rows_, columns_;
  const Operand* panels_;
  Operand* packed_grad_;
  float* sums_;
};

// Address of X in fp32 at a row and a column (a multiple of kPanel).
inline const float* x_at(const WeightGradientArgs& args, Index row, Index column) {
  return static_cast<const float*>(reads_x(args) ? args.x : args.panels) +
         (reads_x(args) ? row * args.x_stride + column
                        : weight_gradient_place(args.m, row, column));
}
inline Index x_stride(const WeightGradientArgs& args) {
  return reads_x(args) ? args.x_stride : kPanel;
}

// kPanel columns, from `column` on, of a row of the result by fp32 FMA, for values that are not
// representable as bf16x3.
inline void fp32_columns(const WeightGradientArgs& args, Index row, Index column, Index width,
                         float* sums) {
  const float* x = x_at(args, 0, column);
  const Index stride = x_stride(args);
  copy_row(args.sums + row * args.k + column, args.first ? 0 : width, sums, kPanel);
  for (Index p = 0; p < args.m; ++p) {
    const float grad = static_cast<const float*>(args.grad)[p * args.grad_stride + row];
    for (Index c = 0; c < width; ++c) sums[c] += grad * x[p * stride + c];
  }
}

// Converts fp32 values to T.
template <class T>
void round_row(const float* from, Index n, T* to) {
  for (Index j = 0; j < n; j += kLanes) store_some(to + j, load_some(from + j, n - j), n - j);
}

template <class T>
void weight_gradient(const WeightGradientArgs& args, Index row_begin, Index row_end,
                     Index column_begin, Index column_end, void* scratch) {
  using P = Product<T>;
  const Index rows = row_end - row_begin, columns = column_end - column_begin;
  const WeightGradientBlock<T> block(static_cast<const T*>(args.grad), args.grad_stride, args.m,
                                     P::kIsBf16x3 ? args.bf16x3_panels : args.panels, row_begin,
                                     rows, column_begin, columns, scratch);
  const auto place = [&](Index i) { return (row_begin + i) * args.k + column_begin; };
  if (!P::kIsBf16x3 && args.first && args.last && block.is_one_part(args.m)) {
    auto* to = static_cast<T*>(args.grad_weight);
    block.multiply_at_once([&](Index i, Index j, Vec low, Vec high) __attribute__((always_inline)) {
      const Index left = columns - j;
      store_some(to + place(i) + j, low, left);
      if (left > kLanes) store_some(to + place(i) + j + kLanes, high, left - kLanes);
    });
    return;
  }
  if (!args.first)
    for (Index i = 0; i < rows; ++i)
      copy_row(args.sums + place(i), columns, block.sums(i), round_up(columns, kPanel));
  block.multiply(!args.first);
  for (Index i = 0; i < rows; ++i) {
    if constexpr (P::kIsBf16x3) {
      for (Index j = 0; j < columns; j += kPanel) {
        float* sums = block.sums(i) + j;
        if (P::needs_fp32(load(sums), load(sums + kLanes)))
          fp32_columns(args, row_begin + i, column_begin + j, min(kPanel, columns - j), sums);
      }
    }
    if (args.last) {
      round_row(block.sums(i), columns, static_cast<T*>(args.grad_weight) + place(i));
    } else {
      copy_row(block.sums(i), columns, args.sums + place(i), columns);
    }
  }
}

template <class T>
void bias_gradient(const WeightGradientArgs& args, Index begin, Index end) {
  column_sums(static_cast<const T*>(args.grad) + begin, args.grad_stride, args.m, end - begin,
              !args.first, args.bias_sums + begin);
  if (args.last)
    round_row(args.bias_sums + begin, end - begin, static_cast<T*>(args.grad_bias) + begin);
}

template <class T>
Index scratch_bytes(const WeightGradientArgs&) {
  return WeightGradientBlock<T>::scratch_bytes();
}

}  // namespace

// The AVX-512 build of fp32 serves the instruction sets above it.
#if !defined(__AVX512BF16__)
namespace {

template <class T>
void slope_rows(const SlopeArgs& args, Index begin, Index end) {
  const Index n = args.n;
  for (Index i = begin; i < end; ++i) {
    const T* grad = static_cast<const T*>(args.grad) + i * args.grad_stride;
    const T* z = static_cast<const T*>(args.z) + i * n;
    T* to = static_cast<T*>(args.to) + i * n;
    for (Index j = 0; j < n; j += kLanes) {
      Vec x = load_some(z + j, n - j);
      const Vec y = activation_backward(load_some(grad + j, n - j), x, args.activation);
      store_some(to + j, y, n - j);
    }
  }
}

Index panels_bytes(Index m, Index k) {
  return round_up(k, kPanel) * m * static_cast<Index>(sizeof(float));
}

void pack_x(const WeightGradientArgs& args, void* panels, Index begin, Index end, void* scratch) {
  // Rows of a panel are adjacent, so the hardware prefetches them. `factors` are of one row.
  const Index at_once = args.dropout.on ? 1 : 16;
  float* factors = static_cast<float*>(scratch);
  for (Index row = begin; row < end; row += at_once) {
    if (args.dropout.on)
      dropout_factors(args.dropout, static_cast<uint64_t>(args.row + row), 0, args.k, factors);
    for (Index j = 0; j < args.k; j += kPanel) {
      for (Index i = row; i < min(end, row + at_once); ++i) {
        const float* from = static_cast<const float*>(args.x) + i * args.x_stride + j;
        float* to = static_cast<float*>(panels) + weight_gradient_place(args.m, i, j);
        TF_UNROLL for (int v = 0; v < kPanel; v += kLanes) {
          const Index have = args.k - j - v;
          Vec x = have > 0 ? load_some(from + v, have) : zero();
          if (args.activation != kIdentity) x = activate(x, args.activation);
          if (args.dropout.on) x = drop(x, load(factors + j + v));
          store(to + v, x);
        }
      }
    }
  }
}

Index pack_scratch_bytes(const WeightGradientArgs& args) {
  return max(scratch_bytes<float>(args),
             args.dropout.on ? (args.k + kPanel) * static_cast<Index>(sizeof(float)) : 0);
}

constexpr WeightGradientKernels kFloatKernels{.pack_rows = 1,
                                              .packed_bytes = panels_bytes,
                                              .pack = pack_x,
                                              .rows = WeightGradientBlock<float>::kRows,
                                              .columns = WeightGradientBlock<float>::kColumns,
                                              .scratch = pack_scratch_bytes,
                                              .block = weight_gradient<float>,
                                              .bias = bias_gradient<float>};

}  // namespace

const WeightGradientKernels* weight_gradient_kernels() { return &kFloatKernels; }

void multiply_by_slope(const SlopeArgs& args, Index begin, Index end) {
  dispatch_element(args.type, [&](auto type) { slope_rows<decltype(type)>(args, begin, end); });
}
#endif

// bfloat16 and float16.
namespace {

template <class T>
Index panels_bytes(Index m, Index k) {
  return packed_bytes<PackedProduct<T>>(k, m);
}

template <class T>
void pack_x(const WeightGradientArgs& args, void* to, Index begin, Index end, void*) {
  pack_transposed<T>(args.x, args.x_stride, args.k, args.m, to, begin / kPackRows<T>,
                     (end + kPackRows<T> - 1) / kPackRows<T>);
}

template <class T>
constexpr WeightGradientKernels kKernels{.pack_rows = kPackRows<T>,
                                         .packed_bytes = panels_bytes<T>,
                                         .pack = pack_x<T>,
                                         .rows = WeightGradientBlock<T>::kRows,
                                         .columns = WeightGradientBlock<T>::kColumns,
                                         .scratch = scratch_bytes<T>,
                                         .block = weight_gradient<T>,
                                         .bias = bias_gradient<T>};

}  // namespace

const WeightGradientKernels* lowp_weight_gradient_kernels(Element type) {
  return type == Element::bfloat16 ? &kKernels<BFloat16> : &kKernels<Float16>;
}

// fp32 as bf16x3: X is split once, dY as it is transposed.
#if defined(__AMX_BF16__)
namespace {

using P = Product<float>;
using Operand = P::Operand;

Index panels_bytes(Index m, Index k) {
  return round_up(k, kPanel) / kPanel * P::panel_size(m) * static_cast<Index>(sizeof(Operand));
}

void pack_x(const WeightGradientArgs& args, void* panels, Index begin, Index end, void*) {
  for (Index p = begin; p < end; p += kPairDepth) {
    for (Index pair = 0; pair < kPairDepth / 2; ++pair) {
      auto* to = static_cast<Operand*>(panels) + P::panel_size(p);
      for (Index j = 0; j < args.k; j += kPanel, to += P::panel_size(args.m))
        pack_bf16x3_pair(x_at(args, p, j), x_stride(args), min(kPanel, args.k - j),
                         min(kPairDepth, args.m - p), pair, to);
    }
  }
}

constexpr WeightGradientKernels kBf16x3Kernels{.pack_rows = kPairDepth,
                                               .packed_bytes = panels_bytes,
                                               .pack = pack_x,
                                               .rows = WeightGradientBlock<float>::kRows,
                                               .columns = WeightGradientBlock<float>::kColumns,
                                               .scratch = scratch_bytes<float>,
                                               .block = weight_gradient<float>};

}  // namespace

const WeightGradientKernels* bf16x3_weight_gradient_kernels() { return &kBf16x3Kernels; }
#endif

}  // namespace tf::TF_ISA
