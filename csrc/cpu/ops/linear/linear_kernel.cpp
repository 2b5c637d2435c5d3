// Linear layer with epilogue; for few rows it reads the weight unpacked.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "cpu/gemm/unpacked.h"
#include "cpu/ops/linear/linear_product.h"

namespace tf::TF_ISA {
namespace {

// Rows of x in a register tile with kColumns rows of W. Accumulators take at most half of the
// registers.
template <int kColumns>
constexpr int kDirectRows = std::min(4, TF_VECTOR_REGISTERS / 2 / kColumns);

// kRows rows of x times kColumns rows of W; rows of sums are kPanel apart.
template <class T, int kRows, int kColumns>
void dot_products(const LinearArgs& args, const T* x, const T* w, float* sums) {
  using P = InPlace<T>;
  const Index stride = args.weight_stride;
  Vec sum[kRows][kColumns];
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kColumns; ++j) sum[i][j] =
      zero();
  const auto step = [&](Index p, const auto& read) __attribute__((always_inline)) {
    typename P::Operand b[kColumns];
    TF_UNROLL for (int j = 0; j < kColumns; ++j) b[j] = read(w + j * stride + p);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      const auto a = read(x + i * args.x_stride + p);
      TF_UNROLL for (int j = 0; j < kColumns; ++j) sum[i][j] = P::add_products(sum[i][j], a, b[j]);
    }
  };
  Index p = 0;
  for (; p + P::kDepth <= args.k; p += P::kDepth) {
    // Prefetches the rows after the ones being read.
    TF_UNROLL for (int j = 0; j < kColumns; ++j) prefetch_l2(w + (j + kColumns) * stride + p);
    step(p, [](const T* from) { return P::read(from); });
  }
  if (p < args.k) step(p, [&](const T* from) { return P::read_n(from, args.k - p); });
  TF_UNROLL for (int i = 0; i < kRows; ++i) store_sums<kColumns>(sum[i], sums + i * kPanel);
}

// All rows of x times kColumns rows of W.
template <class T, int kColumns>
void direct_columns(const LinearArgs& args, const T* w, float* sums) {
  const auto* x = static_cast<const T*>(args.x);
  constexpr int kRows = kDirectRows<kColumns>;
  for (Index i = 0; i < args.m; i += kRows, x += kRows * args.x_stride, sums += kRows * kPanel) {
    const Index rows = min(args.m - i, kRows);
    [&]<int... kBefore>(std::integer_sequence<int, kBefore...>) {
      ((rows == kBefore + 1 ? dot_products<T, kBefore + 1, kColumns>(args, x, w, sums) : void()),
       ...);
    }(std::make_integer_sequence<int, kRows>());
  }
}

template <class T, int kColumns>
void direct_panels(const LinearArgs& args, Index begin, Index end) {
  const RowEpilogue<T> row_epilogue(args, 0);
  const Index stride = args.weight_stride;
  // A panel is finished after the next one's products: reading sums just written would wait.
  float sums[2][kMaxDirectRows * kPanel] = {};
  for (Index p = begin; p <= end; ++p) {
    const Index columns = min(kPanel, args.n - p * kPanel);
    const auto* w = static_cast<const T*>(args.weight) + p * kPanel * stride;
    float* to = sums[p % 2];
    for (Index j = 0; p < end && j < columns;) {
      if (j + kColumns <= columns) {
        direct_columns<T, kColumns>(args, w + j * stride, to + j);
        j += kColumns;
      } else {
        direct_columns<T, 1>(args, w + j * stride, to + j);
        ++j;
      }
    }
    if (p == begin) continue;
    const float* from = sums[(p - 1) % 2];
    const Epilogue<T> epilogue = row_epilogue.of_panel(p - 1);
    for (Index i = 0; i < args.m; ++i, from += kPanel)
      row_epilogue.finish_checked(epilogue, i, p - 1, load(from), load(from + kLanes));
  }
}

// Few rows of x leave little to compute: reading W takes the time. The registers then have room for
// more rows of W, which are prefetched together.
template <class T>
void direct(const LinearArgs& args, Index column_begin, Index column_end) {
  const Index begin = column_begin / kPanel, end = (column_end + kPanel - 1) / kPanel;
  // Not with SSE2, whose conversions take much code.
  if constexpr (TF_VECTOR_REGISTERS >= 32 || kLanes > 4) {
    if (args.m <= kDirectRows<8>) return direct_panels<T, 8>(args, begin, end);
    if (args.m <= kDirectRows<4>) return direct_panels<T, 4>(args, begin, end);
  }
  direct_panels<T, TF_VECTOR_REGISTERS >= 32 ? 4 : 2>(args, begin, end);
}

// Maximum of rows for which panels are packed for one product. In low precision each thread packs
// x, and reads it again for each panel: it takes at most 2 MiB.
template <class T>
Index panels_rows(const LinearArgs& args) {
  using P = PackedProduct<T>;
  if (kTogether<T> == 1) return row_block<P>(args);
  return min(args.transposed ? 256 : 512, (Index{1} << 21) / (P::kBytes * args.k));
}

// For products of operands in T.
template <class T>
constexpr LinearKernels kLinearKernels{
    .in_fp32 = std::is_same_v<T, float>,
    .layout = kPanel + (sizeof(typename PackedProduct<T>::Operand) == 2),
    .panel = kPanel,
    .row_unit = 1,
    .pack_transposed_rows = kPackRows<T>,
    .packed_bytes = packed_bytes<PackedProduct<T>>,
    .pack = pack<T>,
    .pack_transposed = pack_transposed<T>,
    .row_block = row_block<PackedProduct<T>>,
    .scratch = scratch_bytes<T>,
    .block = block<T>,
    .max_depth = std::is_same_v<T, float> ? 2048
                 : kTogether<T> > 1       ? 1 << 20
                                          : 4096,
    .min_panels = std::is_same_v<T, float> ? 0 : 4,
    .together = kTogether<T>,
    .panels_rows = panels_rows<T>,
    .panels_scratch = panels_scratch<T>,
    .fill = fill<T>,
    .panels = panels<T>,
    .direct_unit = kPanel,
    .direct = direct<T>};

}  // namespace

// The AVX-512 build of fp32 serves the instruction sets above it.
#if !defined(__AVX512BF16__)
const LinearKernels* linear_kernels() { return &kLinearKernels<float>; }
#endif

const LinearKernels* lowp_linear_kernels(Element type) {
  return type == Element::bfloat16 ? &kLinearKernels<BFloat16> : &kLinearKernels<Float16>;
}

}  // namespace tf::TF_ISA
