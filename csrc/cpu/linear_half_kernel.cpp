// Linear map with epilogue for half types.
#include "cpu/linear_half_kernel.h"

#include "cpu/linear_product.h"

namespace tf::TF_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kDirectColumns = 4;  // 16 accumulators of 32 registers
#else
constexpr int kDirectColumns = 2;  // 8 of 16
#endif

// kRows rows of x times kColumns rows of W; rows of sums are kPanel apart.
template <int kRows, int kColumns>
void dot_products(const TypedLinearArgs& args, const Float16* w, long stride, float* sums) {
  Vec sum[kRows][kColumns];
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kColumns; ++j) sum[i][j] =
      zero();
  const auto* x = static_cast<const Float16*>(args.x);
  const auto step = [&](long p, const auto& read) __attribute__((always_inline)) {
    Vec b[kColumns];
    TF_UNROLL for (int j = 0; j < kColumns; ++j) b[j] = read(w + j * stride + p);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      const Vec a = read(x + i * args.x_stride + p);
      TF_UNROLL for (int j = 0; j < kColumns; ++j) sum[i][j] = fma(a, b[j], sum[i][j]);
    }
  };
  long p = 0;
  for (; p + kLanes <= args.k; p += kLanes) {
    // These rows are read in turn; those after them come next.
    TF_UNROLL for (int j = 0; j < kColumns; ++j)
        _mm_prefetch(reinterpret_cast<const char*>(w + (j + kColumns) * stride + p), _MM_HINT_T1);
    step(p, [](const Float16* from) { return load(from); });
  }
  if (p < args.k) step(p, [&](const Float16* from) { return load_n(from, args.k - p); });
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kColumns; ++j)
      sums[i * kPanel + j] = reduce_add(sum[i][j]);
}

template <int kRows>
void direct(const TypedLinearArgs& args, long stride, long begin, long end) {
  const RowEnds<Float16> row_ends(args, 0);
  float sums[kRows * kPanel] = {};
  for (long p = begin; p < end; ++p) {
    const long columns = least(kPanel, args.n - p * kPanel);
    const auto* w = static_cast<const Float16*>(args.packed) + p * kPanel * stride;
    long j = 0;
    for (; j + kDirectColumns <= columns; j += kDirectColumns)
      dot_products<kRows, kDirectColumns>(args, w + j * stride, stride, sums + j);
    for (; j < columns; ++j) dot_products<kRows, 1>(args, w + j * stride, stride, sums + j);
    const Ends<Float16> ends = row_ends.of_panel(p);
    for (int i = 0; i < kRows; ++i)
      row_ends.finish_sound(ends, i, p, load(sums + i * kPanel), load(sums + i * kPanel + kLanes));
  }
}

}  // namespace

long half_panel_columns() { return kPanel; }

long half_packed_bytes(Element type, long n, long k) {
  return type == Element::bfloat16 ? packed_bytes<BFloat16>(n, k) : packed_bytes<Float16>(n, k);
}

long half_packed_layout(Element type) {
  return kPanel + (type == Element::bfloat16 && sizeof(Product<BFloat16>::Operand) == 2 ? 1 : 0);
}

void half_pack_panels(Element type, const void* weight, long stride, long n, long k, void* packed,
                      long begin, long end) {
  (type == Element::bfloat16 ? pack<BFloat16> : pack<Float16>)(weight, stride, n, k, packed, begin,
                                                               end);
}

long half_linear_row_block(const TypedLinearArgs& args) {
  return args.type == Element::bfloat16 ? row_block<BFloat16>(args.k) : row_block<Float16>(args.k);
}

long half_linear_scratch(const TypedLinearArgs& args) {
  return args.type == Element::bfloat16 ? scratch_bytes<BFloat16>(args.k)
                                        : scratch_bytes<Float16>(args.k);
}

void half_linear_block(const TypedLinearArgs& args, long row_begin, long row_end, long panel_begin,
                       long panel_end, void* scratch) {
  (args.type == Element::bfloat16 ? block<BFloat16> : block<Float16>)(args, row_begin, row_end,
                                                                      panel_begin, panel_end,
                                                                      scratch);
}

void half_linear_direct(const TypedLinearArgs& args, long weight_stride, long panel_begin,
                        long panel_end) {
  static_assert(kMostDirectRows == 4);
  constexpr decltype(&direct<1>) kByRows[] = {direct<1>, direct<2>, direct<3>, direct<4>};
  kByRows[args.m - 1](args, weight_stride, panel_begin, panel_end);
}

}  // namespace tf::TF_ISA
