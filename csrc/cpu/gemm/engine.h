// GEMM engine: C (m x n) = A (m x k) B (k x n) with fp32 sums, one class per kind of arithmetic
// with a common interface; for kernel files only.
//
//   enter, leave          set up and release the registers of this thread (AMX tiles)
//   Operand, kBytes       type in which A and B are packed; bytes per value
//   kIsBf16x3             a value takes three operands, and infinity becomes NaN in a product:
//                         fp32_row recomputes such a row of C
//   kPacksInParts         a panel that is used once is packed kKBlock of k at a time
//   kKBlock               depth of a part of a panel that stays in cache for all rows
//   kQuantizes            products of 8 bits (int8.h) have only some of the functions below, and
//                         multiply() takes the destination of the results instead of `columns`
//   block_size, fill      a packed block of rows of A, from a tensor
//   chunk, put            the same from computed values, kPanel at a time
//   add, kRounds          sums of values as rounded by put(); whether put() rounds fp32
//   fill_transposed       a packed block of rows of A, from columns of a tensor
//   depth                 rows of B that a panel has room for; those from k on are ignored
//   panel_size, pack_*    a panel of kPanel columns of B, from rows of W = B^T or of B
//   put_pair              two computed rows of a panel, the first of which is 2 * `pair`
//   multiply              a block times a panel, row by row into a sink; if only some columns are
//                         wanted, the others may hold anything
//   multiply_to, steps    the same into memory, calling other work in between; number of calls;
//                         `next` is what to prefetch if there are none
//   kBlockRows            rows of a block for multiply_to that fit in the first-level cache
//   value, element        single values of a chunk and of a panel, as floats
#pragma once

#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/simd/convert.h"
#if defined(__AMX_BF16__)
#include "cpu/gemm/bf16_amx.h"
#elif defined(__AVX512BF16__)
#include "cpu/gemm/bf16_dot.h"
#endif

namespace tf::TF_ISA {
namespace {

// fp32 FMA on the tiles of gemm.h with operands converted to fp32: for fp32, for float16, and for
// bfloat16 without bfloat16 units. Blocks are row-major, as put() and chunk() require, or packed.
template <class T, Form kForm = Form::rows>
class FloatProduct {
 public:
  using Operand = float;
  static constexpr bool kIsBf16x3 = false, kRounds = false, kQuantizes = false;
  static constexpr bool kPacksInParts = true;
  static constexpr Index kBytes = sizeof(Operand);
  static constexpr Index kBlockRows = kBlockTiles * kTileRows;
  static constexpr Index kKBlock = tf::TF_ISA::kKBlock;

  static void enter() {}
  static void leave() {}

  // Even for pairs of rounded rows, so that put_pair() has room.
  static Index depth(Index k) { return std::is_same_v<T, float> ? k : round_up(k, 2); }
  static Index panel_size(Index k) { return kPanel * depth(k); }
  static Index block_size(Index rows, Index k) {
    return (kForm == Form::packed ? (rows + kTileRows - 1) / kTileRows : rows) * stride(k);
  }
  static Operand* chunk(Operand* block, Index k, Index row, Index column) {
    return kForm == Form::packed ? block + column * kPackedRows : block + row * stride(k) + column;
  }
  static void put(Operand* chunk, Vec low, Vec high) {
    store(chunk, low);
    store(chunk + kLanes, high);
  }
  static Vec add(Vec sums, Vec low, Vec high) { return sums + (low + high); }
  static void put_pair(Operand* panel, Index pair, const Vec (&first)[2], const Vec (&second)[2]) {
    put(panel + 2 * pair * kPanel, first[0], first[1]);
    put(panel + (2 * pair + 1) * kPanel, second[0], second[1]);
  }
  static float value(const Operand* chunk, Index column) { return chunk[column]; }
  static float element(const Operand* panel, Index k, Index column) {
    return panel[k * kPanel + column];
  }

  // Adjacent columns of a tensor, taken as rows of A, are in the layout Form::packed already. Parts
  // of rows are short and far apart, so the hardware does not prefetch them.
  static void fill_transposed(const T* from, Index from_stride, Index depth, Index rows,
                              Operand* block, Index k) {
    for (Index u = 0; u < depth; ++u, from += from_stride) {
      each_tile(rows, [&](Index t, Index i, Index) {
        Operand* to = block + t * stride(k) + u * kPackedRows;
        prefetch_l1(from + 8 * from_stride + i);
        TF_UNROLL for (int v = 0; v < kPackedRows; v += kLanes) {
          const Index have = rows - i - v;
          store(to + v, have > 0 ? load_some(from + i + v, have) : zero());
        }
      });
    }
  }

  static void fill(const T* from, Index from_stride, Index rows, Index k, Operand* block) {
    if constexpr (kForm == Form::rows) {
      for (Index i = 0; i < rows; ++i) widen(from + i * from_stride, k, block + i * stride(k));
    } else if constexpr (std::is_same_v<T, float>) {
      pack_a(from, from_stride, rows, k, block, stride(k));
    } else {
      each_tile(rows, [&](Index t, Index i, Index count) {
        float wide[kTileRows * kWide];
        for (Index p = 0; p < k; p += kWide) {
          const Index depth = min(kWide, k - p);
          for (Index r = 0; r < count; ++r)
            widen(from + (i + r) * from_stride + p, depth, wide + r * kWide);
          pack_a(wide, kWide, count, depth, block + t * stride(k) + p * kPackedRows, 0);
        }
      });
    }
  }
  TF_INLINE static void pack_rows(const T* rows, Index stride, Index count, Index k,
                                  Operand* panel) {
    if constexpr (std::is_same_v<T, float>)
      return tf::TF_ISA::pack_rows(rows, stride, count, k, panel);
    float wide[kPanel * kWide];
    for (Index p = 0; p < k; p += kWide) {
      const Index depth = min(kWide, k - p);
      for (Index j = 0; j < count; ++j) widen(rows + j * stride + p, depth, wide + j * kWide);
      tf::TF_ISA::pack_rows(wide, kWide, count, depth, panel + p * kPanel);
    }
  }
  static void pack_columns(const T* rows, Index stride, Index columns, Index k, Operand* panel) {
    for (Index p = 0; p < k; ++p)
      for (Index j = 0; j < kPanel; j += kLanes)
        store(panel + p * kPanel + j,
              j < columns ? load_some(rows + p * stride + j, columns - j) : zero());
  }

  template <class Sink>
  static void multiply(const Operand* block, Index rows, Index k, const Operand* panel,
                       const Operand* next, float* buffer, const Sink& sink,
                       Index columns = kPanel) {
    product(block, k, rows, k, panel, next, false, buffer, kPanel, columns);
    const Sink mine = sink;  // stays in registers
    for (Index i = 0; i < rows; ++i, buffer += kPanel) mine(i, load(buffer), load(buffer + kLanes));
  }
  static Index buffer_size(Index rows) { return rows * kPanel; }

  template <class Meanwhile>
  static void multiply_to(const Operand* block, Index block_k, Index rows, Index k,
                          const Operand* panel, bool accumulate, float* c, Index c_stride,
                          const Meanwhile&, const Operand* next = nullptr) {
    product(block, block_k, rows, k, panel, next != nullptr ? next : panel + panel_size(k),
            accumulate, c, c_stride, kPanel);
  }
  static Index steps(Index, Index) { return 0; }

  static bool needs_fp32(Vec, Vec) { return false; }
  // A row of C.
  template <class Read>
  static void fp32_row(const Read& read, Index k, const Operand* panel, Vec& low, Vec& high) {
    low = high = zero();
    for (Index p = 0; p < k; ++p, panel += kPanel) {
      const Vec x = set1(read(p));
      low = fma(x, load(panel), low);
      high = fma(x, load(panel + kLanes), high);
    }
  }

 private:
  static void product(const Operand* block, Index block_k, Index rows, Index k,
                      const Operand* panel, const Operand* next, bool accumulate, float* c,
                      Index c_stride, Index columns) {
    panel_rows<kForm>(block, stride(block_k), rows, panel, k, c, c_stride, columns, accumulate,
                      next);
  }

  static constexpr Index kWide = 64;
  static constexpr Index kPad = 16;  // avoids cache set conflicts between the rows of a tile
  // Between rows, or between tiles of them if packed.
  static Index stride(Index k) {
    return round_up(k, kPanel) * (kForm == Form::packed ? kPackedRows : 1) + kPad;
  }
  // May write up to whole vectors.
  static void widen(const T* from, Index n, float* to) {
    for (Index j = 0; j < n; j += kLanes) store(to + j, load_some(from + j, n - j));
  }
};

template <class T, Form kForm>
struct ProductOf {
  using Type = FloatProduct<T, kForm>;
};
#if defined(__AMX_BF16__)
template <Form kForm>
struct ProductOf<BFloat16, kForm> {
  using Type = AmxProduct<1>;
};
template <Form kForm>
struct ProductOf<float, kForm> {
  using Type = AmxProduct<3>;
};
#elif defined(__AVX512BF16__)
template <Form kForm>
struct ProductOf<BFloat16, kForm> {
  using Type = DotProduct;
};
#endif
template <class T>
using Product = typename ProductOf<T, Form::rows>::Type;
// Like `Product`, with blocks that multiply faster, but cannot be written by put().
template <class T>
using PackedProduct = typename ProductOf<T, Form::packed>::Type;

// Rows of a block whose operands take `row_bytes` per row, such that the block stays in the
// second-level cache while the weights are streamed.
template <class P>
Index block_rows(Index row_bytes) {
  // Products of narrow operands are fast and need tall blocks, so that the weights are streamed
  // less often.
  constexpr bool kNarrow = sizeof(typename P::Operand) < sizeof(float);
  constexpr Index kMaxRows = kNarrow ? kMostRows : 8 * kTileRows, kUnit = kNarrow ? 32 : kTileRows;
  constexpr Index kBudget = (kNarrow ? 1280 : 768) * 1024;
  return max(kUnit, min(kMaxRows, kBudget / max(1, row_bytes) / kUnit * kUnit));
}

}  // namespace
}  // namespace tf::TF_ISA
