// GEMM engine: C (m x n) = A (m x k) B (k x n) with fp32 sums, one class per kind of arithmetic
// with a common interface; for kernel files only.
//
//   enter, leave          set up and release the registers of this thread (AMX tiles)
//   Operand, kBytes       type in which A and B are packed; bytes per value
//   kIsBf16x3             a value takes three operands, and infinity becomes NaN in a product:
//                         fp32_row recomputes such a row of C
//   block_size, fill      a packed block of rows of A, from a tensor
//   chunk, put            the same from computed values, kPanel at a time
//   add, kRounds          sums of values as rounded by put(); whether put() rounds fp32
//   fill_transposed       16 rows of a block, from columns of a tensor
//   depth                 rows of B that a panel has room for; those from k on are ignored
//   panel_size, pack_*    a panel of kPanel columns of B, from rows of W = B^T or of B
//   put_pair              two computed rows of a panel, the first of which is 2 * `pair`
//   multiply              a block times a panel, row by row into a sink
//   multiply_to, steps    the same into memory, calling other work in between; number of calls
//   kBlockRows            rows of a block for multiply_to that fit in the first-level cache
//   value, element        single values of a chunk and of a panel, as floats
#pragma once

#include "cpu/gemm/gemm.h"
#include "cpu/simd/convert.h"
#if defined(__AMX_BF16__)
#include "cpu/gemm/bf16_amx.h"
#elif defined(__AVX512BF16__)
#include "cpu/gemm/bf16_dot.h"
#endif

namespace tf::TF_ISA {
namespace {

// fp32 FMA on the tiles of gemm.h with operands converted to fp32: for float16, and for bfloat16
// without bfloat16 units.
template <class T>
class FloatProduct {
 public:
  using Operand = float;
  static constexpr bool kIsBf16x3 = false, kRounds = false;
  static constexpr long kBytes = sizeof(Operand);
  static constexpr long kBlockRows = (kLanes == 16 ? 4 : 8) * kTileRows;
  static constexpr long kKBlock = tf::TF_ISA::kKBlock;

  static void enter() {}
  static void leave() {}

  // Even, so that put_pair() has room.
  static long depth(long k) { return round_up(k, 2); }
  static long panel_size(long k) { return kPanel * depth(k); }
  static long block_size(long rows, long k) { return rows * stride(k); }
  static Operand* chunk(Operand* block, long k, long row, long column) {
    return block + row * stride(k) + column;
  }
  static void put(Operand* chunk, Vec low, Vec high) {
    store(chunk, low);
    store(chunk + kLanes, high);
  }
  static Vec add(Vec sums, Vec low, Vec high) { return sums + (low + high); }
  static void put_pair(Operand* panel, long pair, const Vec (&first)[2], const Vec (&second)[2]) {
    put(panel + 2 * pair * kPanel, first[0], first[1]);
    put(panel + (2 * pair + 1) * kPanel, second[0], second[1]);
  }
  static float value(const Operand* chunk, long column) { return chunk[column]; }
  static float element(const Operand* panel, long k, long column) {
    return panel[k * kPanel + column];
  }

  static void fill_transposed(const T* from, long from_stride, long depth, long columns,
                              Operand* block, long k, long row, long column) {
    constexpr long kRows = 16;
    float wide[kLanes * kLanes];
    for (long u = 0; u < depth; u += kLanes) {
      for (long i = 0; i < kRows; i += kLanes) {
        for (long j = 0; j < kLanes; ++j)
          store(wide + j * kLanes, u + j < depth && i < columns
                                       ? load_some(from + (u + j) * from_stride + i, columns - i)
                                       : zero());
        transpose_block(wide, kLanes, block + (row + i) * stride(k) + column + u, stride(k));
      }
    }
  }

  static void fill(const T* from, long from_stride, long rows, long k, Operand* block) {
    for (long i = 0; i < rows; ++i) widen(from + i * from_stride, k, block + i * stride(k));
  }
  static void pack_rows(const T* rows, long stride, long count, long k, Operand* panel) {
    float wide[kPanel * kWide];
    for (long p = 0; p < k; p += kWide) {
      const long depth = min(kWide, k - p);
      for (long j = 0; j < count; ++j) widen(rows + j * stride + p, depth, wide + j * kWide);
      tf::TF_ISA::pack_rows(wide, kWide, count, depth, panel + p * kPanel);
    }
  }
  static void pack_columns(const T* rows, long stride, long columns, long k, Operand* panel) {
    for (long p = 0; p < k; ++p)
      for (long j = 0; j < kPanel; j += kLanes)
        store(panel + p * kPanel + j,
              j < columns ? load_some(rows + p * stride + j, columns - j) : zero());
  }

  template <class Sink>
  static void multiply(const Operand* block, long rows, long k, const Operand* panel,
                       const Operand* next, float* buffer, const Sink& sink) {
    product(block, k, rows, k, panel, next, false, buffer, kPanel);
    for (long i = 0; i < rows; ++i, buffer += kPanel) sink(i, load(buffer), load(buffer + kLanes));
  }
  static long buffer_size(long rows) { return rows * kPanel; }

  template <class Meanwhile>
  static void multiply_to(const Operand* block, long block_k, long rows, long k,
                          const Operand* panel, bool accumulate, float* c, long c_stride,
                          const Meanwhile&) {
    product(block, block_k, rows, k, panel, panel + panel_size(k), accumulate, c, c_stride);
  }
  static long steps(long, long) { return 0; }

 private:
  static void product(const Operand* block, long block_k, long rows, long k, const Operand* panel,
                      const Operand* next, bool accumulate, float* c, long c_stride) {
    panel_rows<Form::rows>(block, stride(block_k), rows, panel, k, c, c_stride, kPanel,
                           {nullptr, accumulate, false}, next);
  }

  static constexpr long kWide = 64;
  static constexpr long kPad = 16;  // avoids cache set conflicts between the rows of a tile
  static long stride(long k) { return round_up(k, kPanel) + kPad; }
  // May write up to whole vectors.
  static void widen(const T* from, long n, float* to) {
    for (long j = 0; j < n; j += kLanes) store(to + j, load_some(from + j, n - j));
  }
};

template <class T>
struct ProductOf {
  using Type = FloatProduct<T>;
};
#if defined(__AMX_BF16__)
template <>
struct ProductOf<BFloat16> {
  using Type = AmxProduct<1>;
};
template <>
struct ProductOf<float> {
  using Type = AmxProduct<3>;
};
#elif defined(__AVX512BF16__)
template <>
struct ProductOf<BFloat16> {
  using Type = DotProduct;
};
#endif
template <class T>
using Product = typename ProductOf<T>::Type;

}  // namespace
}  // namespace tf::TF_ISA
