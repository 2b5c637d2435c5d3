// Linear layer with epilogue on the GEMM engine (engine.h). A block of rows is packed once and
// stays in the second-level cache; the weights are streamed in panels, and each row of a result is
// finished in registers. For kernel files only.
#pragma once

#include "cpu/gemm/epilogue.h"
#include "cpu/ops/linear/linear.h"

namespace tf::TF_ISA {
namespace {

// If k is large, few rows fit in the cache, and the weights would be streamed too often. So k is
// split into slabs, whose products are accumulated in a block of the result.
constexpr Index kSlab = 512, kSlabColumns = 512;
constexpr Index kSlabStride = kSlabColumns + 16;  // not a power of two

template <class P>
constexpr bool kNarrow = P::kBytes < static_cast<Index>(sizeof(float));
template <class P>
bool in_slabs(Index k) {
  return !kNarrow<P> && k > (P::kIsBf16x3 ? 1024 : kLanes == 16 ? 1755 : 4096);
}

template <class P>
Index row_block(const LinearArgs& args) {
  return block_rows<P>((in_slabs<P>(args.k) ? kSlab : args.k) * P::kBytes);
}

template <class T, class P = PackedProduct<T>>
void pack(const void* weight, Index stride, Index n, Index k, void* packed, Index begin,
          Index end) {
  auto* panels = static_cast<typename P::Operand*>(packed);
  for (Index p = begin; p < end; ++p) {
    const Index row = p * kPanel;
    P::pack_rows(static_cast<const T*>(weight) + row * stride, stride, min(kPanel, n - row), k,
                 panels + p * P::panel_size(k));
  }
}

// Rows of W^T packed at a time: few in fp32, since they are read far apart.
template <class T>
constexpr Index kPackRows = std::is_same_v<T, float> ? 8 : 32;
template <class T>
void pack_transposed(const void* transposed, Index stride, Index n, Index k, void* packed,
                     Index begin, Index end) {
  using P = PackedProduct<T>;
  constexpr Index kRows = kPackRows<T>;
  for (Index block = begin; block < end; ++block) {
    const Index p = block * kRows, depth = min(kRows, k - p);
    const T* rows = static_cast<const T*>(transposed) + p * stride;
    auto* panel = static_cast<typename P::Operand*>(packed) + P::panel_size(p);
    for (Index j = 0; j < n; j += kPanel, panel += P::panel_size(k))
      P::pack_columns(rows + j, stride, min(kPanel, n - j), depth, panel);
  }
}

// Epilogue of the rows from `row` on. T: type of bias and residual; X, Y: types of x and y.
template <class T, class P = PackedProduct<T>, class X = T, class Y = T>
class RowEpilogue {
  using Operand = typename P::Operand;

 public:
  // `block` holds the same rows, packed.
  RowEpilogue(const LinearArgs& call, Index row, const Operand* block = nullptr)
      : args_(call),
        block_(block),
        x_(static_cast<const X*>(call.x) + row * call.x_stride),
        y_(static_cast<Y*>(call.y) + row * call.y_stride),
        residual_(static_cast<const T*>(call.residual)),
        preactivation_(static_cast<T*>(call.preactivation)),
        n_(call.n),
        y_stride_(call.y_stride),
        residual_stride_(call.residual_stride),
        multiplies_(call.multiplies) {
    if (residual_ != nullptr) residual_ += row * residual_stride_;
    if (preactivation_ != nullptr) preactivation_ += row * n_;
  }

  Epilogue<T> of_panel(Index p) const {
    return Epilogue<T>(args_.bias, p * kPanel, args_.n, args_.activation,
                       P::kQuantizes ? args_.scale : nullptr);
  }

  TF_INLINE void finish(const Epilogue<T>& epilogue, Index i, Index p, Vec low, Vec high) const {
    if constexpr (P::kIsBf16x3) {
      if (P::needs_fp32(low, high))
        P::fp32_row([&](Index k) { return x(i, k); }, args_.k,
                    static_cast<const Operand*>(args_.packed) + p * P::panel_size(args_.k), low,
                    high);
    }
    if constexpr (P::kQuantizes) epilogue.dequantize(P::row_scale(block_, i), low, high);
    finish_checked(epilogue, i, p, low, high);
  }

  // The same for sums that need no fp32 recomputation.
  TF_INLINE void finish_checked(const Epilogue<T>& epilogue, Index i, Index p, Vec low,
                                Vec high) const {
    const Index column = p * kPanel;
    epilogue.add_bias(low, high);
    if (preactivation_ != nullptr) epilogue.write(preactivation_ + i * n_ + column, low, high);
    epilogue.activate(low, high);
    Y* y = y_ + i * y_stride_ + column;
    if (multiplies_) epilogue.multiply(y, low, high);
    if (residual_ != nullptr) epilogue.add(residual_ + i * residual_stride_ + column, low, high);
    epilogue.write(y, low, high);
  }

  // The last argument of P::multiply(): the place of the results, or the number of columns.
  auto destination(Index p) const {
    if constexpr (P::kQuantizes)
      return
          typename P::Destination{y_ + p * kPanel, args_.y_stride * static_cast<Index>(sizeof(Y))};
    else
      return min(kPanel, args_.n - p * kPanel);
  }

  float x(Index i, Index k) const { return load_one(x_ + i * args_.x_stride + k); }

 private:
  const LinearArgs& args_;
  const Operand* block_;
  const X* x_;
  Y* y_;
  const T* residual_;
  T* preactivation_;
  // Copies stay in registers: the compiler must assume that a store changes args_.
  Index n_, y_stride_, residual_stride_;
  bool multiplies_;
};

// Packs `rows` rows of x from row `row` on.
template <class X, class P>
void fill_rows(const LinearArgs& args, Index row, Index rows, typename P::Operand* block) {
  const X* x = static_cast<const X*>(args.x) + row * args.x_stride;
  if constexpr (P::kQuantizes)
    P::fill(x, args.x_stride, rows, args.k, block, args.factors);
  else
    P::fill(x, args.x_stride, rows, args.k, block);
}

// Rows [row, row + rows) of panels [begin, end). Without kFill the rows are packed already.
template <class T, class P = PackedProduct<T>, class X = T, class Y = T, bool kFill = true>
void row_panels(const LinearArgs& args, Index row, Index rows, Index begin, Index end,
                void* scratch) {
  const auto* packed = static_cast<const typename P::Operand*>(args.packed);
  auto* a = static_cast<typename P::Operand*>(scratch);
  float* sums = reinterpret_cast<float*>(a + P::block_size(rows, args.k));
  const Index size = P::panel_size(args.k);
  if constexpr (kFill) fill_rows<X, P>(args, row, rows, a);
  const RowEpilogue<T, P, X, Y> row_epilogue(args, row, a);
  for (Index p = begin; p < end; ++p) {
    const auto* panel = packed + p * size;
    P::multiply(
        a, rows, args.k, panel, panel + size, sums,
        [=, epilogue = row_epilogue.of_panel(p)](Index i, Vec low, Vec high)
            __attribute__((always_inline)) { row_epilogue.finish(epilogue, i, p, low, high); },
        row_epilogue.destination(p));
  }
}

// The same in slabs, for at most kSlabColumns.
template <class T, class P = PackedProduct<T>>
void row_panels_in_slabs(const LinearArgs& args, Index row, Index rows, Index begin, Index end,
                         void* scratch) {
  using Operand = typename P::Operand;
  const auto* packed = static_cast<const Operand*>(args.packed);
  auto* a = static_cast<Operand*>(scratch);
  float* sums = reinterpret_cast<float*>(a + P::block_size(row_block<P>(args), kSlab));
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const Index size = P::panel_size(args.k);
  for (Index p = 0; p < args.k; p += kSlab) {
    const Index depth = min(kSlab, args.k - p);
    P::fill(x + p, args.x_stride, rows, depth, a);
    const Index bytes = P::panel_size(depth) * static_cast<Index>(sizeof(Operand));
    for (Index j = begin; j < end; ++j) {
      const Operand* panel = packed + j * size + P::panel_size(p);
      FetchAhead fetch(panel + size, bytes, P::steps(rows, depth));
      P::multiply_to(
          a, depth, rows, depth, panel, p > 0, sums + (j - begin) * kPanel, kSlabStride,
          [&]() __attribute__((always_inline)) { fetch(); }, panel + size);
    }
  }
  const RowEpilogue<T, P> row_epilogue(args, row);
  for (Index j = begin; j < end; ++j) {
    const Epilogue<T> epilogue = row_epilogue.of_panel(j);
    for (Index i = 0; i < rows; ++i) {
      const float* from = sums + i * kSlabStride + (j - begin) * kPanel;
      row_epilogue.finish(epilogue, i, j, load(from), load(from + kLanes));
    }
  }
}

template <class T, class P = PackedProduct<T>, class X = T, class Y = T>
void block(const LinearArgs& args, Index row_begin, Index row_end, Index panel_begin,
           Index panel_end, void* scratch) {
  P::enter();
  const bool slabs = in_slabs<P>(args.k);
  const Index max_rows = row_block<P>(args), step = slabs ? kSlabColumns / kPanel : panel_end;
  const Index count = (row_end - row_begin + max_rows - 1) / max_rows;
  for (Index item = 0, row = row_begin; item < count; ++item) {
    const Index rows = (row_end - row + count - item - 1) / (count - item);
    for (Index p = panel_begin; p < panel_end; p += step) {
      const Index end = min(panel_end, p + step);
      if constexpr (kNarrow<P>) {
        row_panels<T, P, X, Y>(args, row, rows, p, end, scratch);
      } else {
        (slabs ? row_panels_in_slabs<T, P> : row_panels<T, P>)(args, row, rows, p, end, scratch);
      }
    }
    row += rows;
  }
  P::leave();
}

template <class T, class P = PackedProduct<T>>
Index scratch_bytes(const LinearArgs& args) {
  const Index rows = row_block<P>(args);
  const bool slabs = in_slabs<P>(args.k);
  return P::block_size(rows, slabs ? kSlab : args.k) *
             static_cast<Index>(sizeof(typename P::Operand)) +
         (slabs ? rows * kSlabStride : P::buffer_size(rows)) * static_cast<Index>(sizeof(float));
}

template <class P>
Index packed_bytes(Index n, Index k) {
  return round_up(n, kPanel) / kPanel * P::panel_size(k) *
         static_cast<Index>(sizeof(typename P::Operand));
}

template <class X, class P = PackedProduct<X>>
void fill(const LinearArgs& args, void* scratch) {
  fill_rows<X, P>(args, 0, args.m, static_cast<typename P::Operand*>(scratch));
}

// Panels that are packed together, in low precision, if their columns are columns of W: columns are
// adjacent in memory, while two rows of W may lie in two pages.
template <class T>
constexpr Index kTogether = sizeof(T) == 2 && PackedProduct<T>::kPacksInParts ? 4 : 1;

// Packs up to kTogether panels of the weight, for this product only and in the cache of the thread
// that multiplies by them.
template <class T>
void unpacked_panels(const LinearArgs& args, Index begin, Index end, void* scratch) {
  using P = PackedProduct<T>;
  using Operand = typename P::Operand;
  const auto* weight = static_cast<const T*>(args.weight);
  const auto columns = [&](Index p) { return min(kPanel, args.n - p * kPanel); };
  // multiply_to() has no narrow form, which narrow panels of fp32 need.
  const bool splits = P::kPacksInParts && (sizeof(T) == 2 || columns(begin) > kLanes);
  const Index k = args.k, stride = args.weight_stride, part = splits ? min(P::kKBlock, k) : k;
  const Index step = P::kPacksInParts ? kPackRows<T> : k, size = P::panel_size(part);
  auto* a = static_cast<Operand*>(scratch);
  Operand* const place = a + P::block_size(args.m, k);
  float* const sums = reinterpret_cast<float*>(place + kTogether<T> * size);
  const RowEpilogue<T, P> row_epilogue(args, 0, a);
  P::enter();
  for (Index from = 0; from < k; from += part) {
    const Index depth = min(part, k - from);
    if (args.transposed) {
      for (Index q = 0; q < depth; q += step) {
        for (Index p = begin; p < end; ++p) {
          const T* rows = weight + (from + q) * stride + p * kPanel;
          P::pack_columns(rows, stride, columns(p), min(step, depth - q),
                          place + (p - begin) * size + P::panel_size(q));
          // Rows are far apart: hardware does not prefetch them.
          for (Index i = step; P::kPacksInParts && i < 2 * step; ++i)
            prefetch_l1(rows + i * stride);
        }
      }
    } else {
      P::pack_rows(weight + begin * kPanel * stride + from, stride, columns(begin), depth, place);
    }
    for (Index p = begin; p < end; ++p) {
      const Operand *panel = place + (p - begin) * size, *next = panel;
      // Prefetches the next rows of W during the product if they are as long as a panel.
      if constexpr (sizeof(Operand) == sizeof(T))
        if (!args.transposed) next = weight + (p + 1) * kPanel * stride + from * kPanel;
      float* c = sums + (p - begin) * args.m * kPanel;
      if (part < k)
        P::multiply_to(
            P::chunk(a, k, 0, from), k, args.m, depth, panel, from > 0, c, kPanel, [] {}, next);
      if (from + depth < k) continue;
      const auto sink =
          [=, epilogue = row_epilogue.of_panel(p)](Index i, Vec low, Vec high)
              __attribute__((always_inline)) { row_epilogue.finish(epilogue, i, p, low, high); };
      if (part == k) {
        P::multiply(a, args.m, k, panel, next, sums, sink, columns(p));
      } else {
        for (Index i = 0; i < args.m; ++i, c += kPanel) sink(i, load(c), load(c + kLanes));
      }
    }
  }
  P::leave();
}

// All rows at once times some panels; fill() has packed x.
template <class T, class P = PackedProduct<T>, class X = T, class Y = T>
void panels(const LinearArgs& args, Index begin, Index end, void* scratch) {
  if constexpr (!P::kQuantizes)
    if (args.packed == nullptr) return unpacked_panels<T>(args, begin, end, scratch);
  P::enter();
  row_panels<T, P, X, Y, false>(args, 0, args.m, begin, end, scratch);
  P::leave();
}

template <class T, class P = PackedProduct<T>>
Index panels_scratch(const LinearArgs& args) {
  Index values = P::block_size(args.m, args.k), sums = P::buffer_size(args.m);
  if constexpr (!P::kQuantizes) {
    const Index part = kTogether<T> > 1 ? min(P::kKBlock, args.k) : args.k;
    if (args.packed == nullptr) values += kTogether<T> * P::panel_size(part);
    sums *= kTogether<T>;
  }
  return values * static_cast<Index>(sizeof(typename P::Operand)) +
         sums * static_cast<Index>(sizeof(float));
}

}  // namespace
}  // namespace tf::TF_ISA
