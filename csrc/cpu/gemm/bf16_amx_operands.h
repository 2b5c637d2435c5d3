// Operand layouts of AMX products (bf16_amx.h): A in tiles of 16 rows x 32 values, B in panels of
// pairs (bf16_pairs.h). For kernel files only.
//
// kComponents is 1 for bfloat16 operands. With 3, fp32 operands are stored as bf16x3 (bf16x3.h),
// the components of a block next to each other.
#pragma once

#include <type_traits>

#include "cpu/gemm/bf16_pairs.h"
#include "cpu/gemm/bf16x3.h"

namespace tf::TF_ISA {
namespace {

template <int kComponents>
class AmxOperands {
  static_assert(kComponents == 1 || kComponents == 3);

 public:
  using Operand = BFloat16;
  using Element = std::conditional_t<kComponents == 1, BFloat16, float>;
  static constexpr bool kIsBf16x3 = kComponents == 3, kRounds = !kIsBf16x3;
  static constexpr long kBytes = kComponents * sizeof(Operand);
  static constexpr long kTile = 16, kTileSize = kTile * kPairDepth;

  static long depth(long k) { return pair_depth(k); }
  static long panel_size(long k) { return kComponents * kPanel * pair_depth(k); }
  static long block_size(long rows, long k) {
    return kComponents * round_up(rows, kTile) * pair_depth(k);
  }

  // Address of the kPanel values of A from `column` on (a multiple of kPanel) of a row.
  static Operand* chunk(Operand* block, long k, long row, long column) {
    return block + (row / kTile * kTile * pair_depth(k) + column * kTile) * kComponents +
           row % kTile * kPanel;
  }
  static void put(Operand* chunk, Vec low, Vec high) {
    if constexpr (kIsBf16x3) {
      store_bf16x3(chunk, kTileSize, low, high);
    } else {
      store_rounded(chunk, low, high);
    }
  }
  static Vec add(Vec sums, Vec low, Vec high) {
    if constexpr (kIsBf16x3) {
      return sums + (low + high);
    } else {
      return add_rounded(sums, low, high);
    }
  }
  // put() for finite values: infinity becomes NaN, which needs_fp32() detects.
  static void put_finite(Operand* chunk, Vec low, Vec high) {
    if constexpr (kIsBf16x3) {
      store_bf16x3<true>(chunk, kTileSize, low, high);
    } else {
      store_rounded(chunk, low, high);
    }
  }

  // Row numbers in B of the rows of `pair`: the first (which = 0) and the second.
  static long pair_row(long pair, int which) {
    return kIsBf16x3 ? pair / 16 * kPairDepth + pair % 16 + 16 * which : 2 * pair + which;
  }
  static Operand* pair_place(Operand* panel, long pair) {
    return panel + pair / 16 * kComponents * kPanel * kPairDepth + pair % 16 * 2 * kPanel;
  }
  // Stores two such rows, of finite values, in a panel of B.
  static void put_pair(Operand* panel, long pair, const Vec (&first)[2], const Vec (&second)[2]) {
    Operand* to = pair_place(panel, pair);
    if constexpr (kIsBf16x3) {
      TF_UNROLL for (int u = 0; u < 2; ++u)
          store_bf16x3<true>(to + u * kPanel, 2 * kTileSize, first[u], second[u]);
    } else {
      TF_UNROLL for (int u = 0; u < 2; ++u) store_interleaved(to + u * kPanel, first[u], second[u]);
    }
  }
  // The same, and as rows of A as well.
  static void put_both(Operand* first_chunk, Operand* second_chunk, Operand* panel, long pair,
                       const Vec (&first)[2], const Vec (&second)[2]) {
    if constexpr (kIsBf16x3) {
      Operand* to = pair_place(panel, pair);
      __m512i one[2][kSplitComponents], two[2][kSplitComponents];
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        split_bf16x3_finite(first[u], one[u]);
        split_bf16x3_finite(second[u], two[u]);
      }
      TF_UNROLL for (int i = 0; i < kSplitComponents; ++i) {
        _mm512_storeu_si512(first_chunk + i * kTileSize, pairs(one[0][i], one[1][i]));
        _mm512_storeu_si512(second_chunk + i * kTileSize, pairs(two[0][i], two[1][i]));
        TF_UNROLL for (int u = 0; u < 2; ++u)
            _mm512_storeu_si512(to + i * 2 * kTileSize + u * kPanel, pairs(one[u][i], two[u][i]));
      }
    } else {
      put(first_chunk, first[0], first[1]);
      put(second_chunk, second[0], second[1]);
      put_pair(panel, pair, first, second);
    }
  }
  static float value(const Operand* chunk, long column) {
    return whole(chunk + (kIsBf16x3 ? place_in_block(column) : column), kTileSize);
  }
  static float element(const Operand* panel, long k, long column) {
    const long block = k / kPairDepth,
               place = kIsBf16x3 ? place_in_block(k % kPairDepth) : k % kPairDepth;
    return whole(panel + block * kPairDepth * kPanel * kComponents + place / 2 * 2 * kPanel +
                     column * 2 + place % 2,
                 2 * kTileSize);
  }

  // Tile by tile: the values of one row are so far apart in the block that they share few cache
  // sets.
  static void fill(const Element* from, long stride, long rows, long k, Operand* block) {
    for (long tile = 0; tile < rows; tile += kTile) {
      for (long p = 0; p < k; p += kPanel) {
        for (long i = tile; i < min(tile + kTile, rows); ++i) {
          const Element* row = from + i * stride + p;
          if constexpr (kIsBf16x3) {
            put(chunk(block, k, i, p), load_some(row, min(kLanes, k - p)),
                k - p > kLanes ? load_some(row + kLanes, k - p - kLanes) : zero());
          } else {
            _mm512_storeu_si512(chunk(block, k, i, p), load_values(row, k - p));
          }
        }
      }
    }
  }

  // Rows of A from columns of a tensor, of which the first `depth` rows are read; they must be
  // finite. The rest of the tiles is 0.
  static void fill_transposed(const Element* from, long stride, long depth, long rows,
                              Operand* block, long k) {
    for (long p = 0; p < depth; p += kPairDepth)
      for (long i = 0; i < rows; i += kTile)
        fill_transposed_tile(from + p * stride + i, stride, min(kPairDepth, depth - p),
                             min(kTile, rows - i), chunk(block, k, i, p));
  }

  static void pack_rows(const Element* rows, long stride, long count, long k, Operand* panel) {
    if constexpr (kIsBf16x3) {
      pack_bf16x3_rows(rows, stride, count, k, panel);
    } else {
      pack_pair_rows(rows, stride, count, k, panel);
    }
  }
  static void pack_columns(const Element* rows, long stride, long columns, long k, Operand* panel) {
    if constexpr (kIsBf16x3) {
      pack_bf16x3_columns(rows, stride, columns, k, panel);
    } else {
      pack_pair_columns(rows, stride, columns, k, panel);
    }
  }

  // Stores 0 in place of numbers that are not representable.
  static void pack_representable_columns(const Element* rows, long stride, long columns, long k,
                                         Operand* panel) {
    static_assert(kIsBf16x3);
    pack_bf16x3_columns<true>(rows, stride, columns, k, panel);
  }

  // Whether x is not representable as bf16x3.
  template <class X>
  static auto not_representable(X x) {
    return not_bf16x3(x);
  }
  using RangeCheck = Bf16x3RangeCheck;
  // Whether sums may be wrong and must be recomputed in fp32: infinity became NaN, or they are so
  // small that components were flushed to 0.
  static bool needs_fp32(Vec low, Vec high) {
    // The bits of positive floats order like the floats.
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    const __m512i largest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), size),
                                             _mm512_and_si512(_mm512_castps_si512(high), size));
    constexpr int kInfinity = 0x7f800000;
    if (_mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(kInfinity)) != 0) return true;
    const __m512i small = _mm512_castps_si512(set1(kSmall));
    return _mm512_cmpgt_epu32_mask(largest, small) == 0 &&
           _mm512_test_epi32_mask(largest, largest) != 0;
  }

  // A row of C by fp32 FMA, for operands that are not representable as bf16x3.
  template <class Read>
  static void fp32_row(const Read& read, long k, const Operand* panel, Vec& low, Vec& high) {
    low = high = zero();
    for (long p = 0; p < k; ++p) {
      const Vec x = set1(read(p));
      const long block = p / kPairDepth, place = place_in_block(p % kPairDepth);
      Vec b[2];
      load_bf16x3(panel + block * kPairDepth * kPanel * kComponents + place / 2 * 2 * kPanel,
                  2 * kTileSize, place % 2, b);
      low = fma(x, b[0], low);
      high = fma(x, b[1], high);
    }
  }

 private:
  // The sum of the components of an operand, `apart` from each other.
  static float whole(const Operand* operand, long apart) {
    float sum = load_one(operand);
    for (int piece = 1; piece < kComponents; ++piece) sum += load_one(operand + piece * apart);
    return sum;
  }

  static void fill_transposed_tile(const Element* from, long stride, long depth, long columns,
                                   Operand* tile) {
    if constexpr (kIsBf16x3) {
      alignas(64) float transposed[2][kTile * kTile];
      transpose_floats(from, stride, min(kTile, depth), columns, transposed[0]);
      transpose_floats(from + kTile * stride, stride, depth - kTile, columns, transposed[1]);
      for (long r = 0; r < kTile; ++r)
        put_finite(tile + r * kPanel, load(transposed[0] + r * kTile),
                   load(transposed[1] + r * kTile));
    } else {
      transpose_pairs(from, stride, depth, columns, tile, kPanel);
    }
  }

  // to[r][j] = j < count ? from[j][r] : 0, for r and j < kTile.
  static void transpose_floats(const float* from, long stride, long count, long columns,
                               float* to) {
    if (columns >= kTile && count == kTile) return transpose_block(from, stride, to, kTile);
    alignas(64) float some[kTile * kTile] = {};
    for (long j = 0; j < count; ++j) store(some + j * kTile, load_some(from + j * stride, columns));
    transpose_block(some, kTile, to, kTile);
  }
};

}  // namespace
}  // namespace tf::TF_ISA
