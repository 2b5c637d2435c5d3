// bfloat16 GEMM with vdpbf16ps: the register tile of gemm.h, with a pair of k per lane. For kernel
// files built with AVX-512-BF16.
#pragma once

#include "cpu/gemm/bf16_pairs.h"

namespace tf::TF_ISA {
namespace {

// C (kRows x kPanel) = A B or += A B; A row-major, B `pairs` rows of a panel of pairs.
template <int kRows>
void dot_tile(const BFloat16* a, Index a_stride, const BFloat16* panel, Index pairs, float* c,
              Index c_stride, bool accumulate, const char* ahead, Index ahead_step) {
  Vec acc[kRows][2];
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < 2; ++j) acc[i][j] =
      accumulate ? load(c + i * c_stride + j * kLanes) : zero();
  // One pointer for three rows, as in gemm.h.
  const BFloat16* row[(kRows + 2) / 3];
  TF_UNROLL for (int i = 0; i < (kRows + 2) / 3; ++i) row[i] = a + 3 * i * a_stride;
  for (Index p = 0; p < pairs; ++p) {
    prefetch_l2(ahead);
    ahead += ahead_step;
    const __m512bh low = (__m512bh)_mm512_loadu_si512(panel);
    const __m512bh high = (__m512bh)_mm512_loadu_si512(panel + kPanel);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      std::memcpy(&pair, row[i / 3] + (i % 3) * a_stride, sizeof(pair));
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, low);
      acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, high);
    }
    TF_UNROLL for (int i = 0; i < (kRows + 2) / 3; ++i) row[i] += 2;
    panel += 2 * kPanel;
  }
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < 2; ++j)
      store(c + i * c_stride + j * kLanes, acc[i][j]);
}

class DotProduct {
 public:
  using Operand = BFloat16;
  static constexpr bool kIsBf16x3 = false, kRounds = true, kQuantizes = false;
  static constexpr bool kPacksInParts = true;
  static constexpr Index kBytes = sizeof(Operand);
  static constexpr Index kBlockRows = 4 * kTileRows;
  static constexpr Index kKBlock = 256;  // a panel block of half the first-level cache

  static void enter() {}
  static void leave() {}

  static Index panel_size(Index k) { return kPanel * pair_depth(k); }
  static Index block_size(Index rows, Index k) { return rows * stride(k); }
  static Operand* chunk(Operand* block, Index k, Index row, Index column) {
    return block + row * stride(k) + column;
  }
  static void put(Operand* chunk, Vec low, Vec high) { store_rounded(chunk, low, high); }
  static Vec add(Vec sums, Vec low, Vec high) { return add_rounded(sums, low, high); }
  static float value(const Operand* chunk, Index column) { return load_one(chunk + column); }
  static float element(const Operand* panel, Index k, Index column) {
    return load_one(panel + k / 2 * 2 * kPanel + column * 2 + k % 2);
  }

  static void fill(const BFloat16* from, Index from_stride, Index rows, Index k, Operand* block) {
    for (Index i = 0; i < rows; ++i)
      for (Index p = 0; p < k; p += kPanel)
        _mm512_storeu_si512(chunk(block, k, i, p), load_values(from + i * from_stride + p, k - p));
  }
  static void fill_transposed(const BFloat16* from, Index from_stride, Index depth, Index rows,
                              Operand* block, Index k) {
    for (Index p = 0; p < depth; p += kPairDepth)
      for (Index i = 0; i < rows; i += 16)
        transpose_pairs(from + p * from_stride + i, from_stride, depth - p, min(16, rows - i),
                        chunk(block, k, i, p), stride(k));
  }
  static Index depth(Index k) { return pair_depth(k); }
  static void put_pair(Operand* panel, Index pair, const Vec (&first)[2], const Vec (&second)[2]) {
    TF_UNROLL for (int u = 0; u < 2; ++u)
        store_interleaved(panel + (2 * pair + u) * kPanel, first[u], second[u]);
  }

  // Row numbers in B of the two rows of `pair`.
  static Index pair_row(Index pair, int which) { return 2 * pair + which; }
  // Stores two such rows in a panel of B, and as rows of A as well.
  static void put_both(Operand* first_chunk, Operand* second_chunk, Operand* panel, Index pair,
                       const Vec (&first)[2], const Vec (&second)[2]) {
    put(first_chunk, first[0], first[1]);
    put(second_chunk, second[0], second[1]);
    put_pair(panel, pair, first, second);
  }
  using RangeCheck = Bf16x3RangeCheck;

  static void pack_rows(const BFloat16* rows, Index stride, Index count, Index k, Operand* panel) {
    pack_pair_rows(rows, stride, count, k, panel);
  }
  static void pack_columns(const BFloat16* rows, Index stride, Index columns, Index k,
                           Operand* panel) {
    pack_pair_columns(rows, stride, columns, k, panel);
  }

  template <class Sink>
  static void multiply(const Operand* block, Index rows, Index k, const Operand* panel,
                       const Operand* next, float* buffer, const Sink& sink, Index = kPanel) {
    product(block, k, rows, k, panel, next, false, buffer, kPanel);
    for (Index i = 0; i < rows; ++i, buffer += kPanel) sink(i, load(buffer), load(buffer + kLanes));
  }
  static Index buffer_size(Index rows) { return rows * kPanel; }

  template <class Meanwhile>
  static void multiply_to(const Operand* block, Index block_k, Index rows, Index k,
                          const Operand* panel, bool accumulate, float* c, Index c_stride,
                          const Meanwhile&, const Operand* next = nullptr) {
    product(block, block_k, rows, k, panel, next != nullptr ? next : panel + panel_size(k),
            accumulate, c, c_stride);
  }
  static Index steps(Index, Index) { return 0; }

 private:
  static void product(const Operand* block, Index block_k, Index rows, Index k,
                      const Operand* panel, const Operand* next, bool accumulate, float* c,
                      Index c_stride) {
    // Whole pairs; the padding contributes nothing.
    const Index depth = round_up(k, 2), count = (rows + kTileRows - 1) / kTileRows;
    Index p = 0;
    do {
      const Index here = min(kKBlock, depth - p);
      const Operand* after = p + here == depth ? next : panel + (p + here) * kPanel;
      const char* ahead = reinterpret_cast<const char*>(after);
      const Index step = 2 * kPanel * static_cast<Index>(sizeof(Operand)) / count;
      for (Index i = 0, left = count; i < rows; --left) {
        const Index tile_rows = (rows - i + left - 1) / left;
        kTiles[tile_rows - 1](block + i * stride(block_k) + p, stride(block_k), panel + p * kPanel,
                              here / 2, c + i * c_stride, c_stride, accumulate || p > 0, ahead,
                              step);
        ahead += here / 2 * step;
        i += tile_rows;
      }
      p += here;
    } while (p < depth);
  }

  static constexpr auto kTiles =
      list_tiles([](auto rows) { return &dot_tile<decltype(rows)::value>; });
  // Not a power of two, which would map the rows of a tile to one cache set.
  static Index stride(Index k) { return pair_depth(k) + 32; }
};

}  // namespace
}  // namespace tf::TF_ISA
