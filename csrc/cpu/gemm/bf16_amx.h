// GEMM on AMX tiles (Intel SDM volume 1, chapter 18): C (m x kPanel) = A B with fp32 sums. Two by
// two accumulators share two tiles of A and two of B, so that each loaded tile is used twice. For
// kernel files only.
//
// With kComponents = 3, a product is the sum of the six products of components that contribute to
// fp32 precision (bf16x3). It is 2.5 times as fast as fp32 FMA and as accurate: products of
// components are exact, and sums are rounded once per 32 of them.
#pragma once

#include <type_traits>

#include "cpu/gemm/bf16_pairs.h"

namespace tf::TF_ISA {
namespace {

// Palette 1, all eight tiles 16 rows of 64 bytes.
struct alignas(64) AmxTileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Static: the intrinsic declares only 8 bytes as read, so GCC would drop stores to a local one.
constexpr AmxTileConfig kAmxTileConfig;

// Compiler barrier: tile loads declare no memory operand in GCC, so it could move stores behind
// them.
TF_INLINE void compiler_barrier() { asm volatile("" ::: "memory"); }

// After about 2,000 cycles without 512-bit floating-point work the processor powers that unit down,
// and the next tile store waits 1,000 cycles for it (measured on a Xeon with AMX).
TF_INLINE void keep_avx512_active() {
  __m512 any;
  asm volatile("vaddps %1, %1, %0" : "=v"(any) : "v"(_mm512_setzero_ps()));
}

// Adds a step of products to the sums of two by two tiles, or of one by two without kTwo: two tiles
// of A, whose rows are `row` bytes apart, and a panel of B, each loaded if new. Loads are issued
// before meanwhile(): otherwise they wait for its stores.
template <bool kInt8, bool kTwo, bool kNewA, bool kNewB, class Meanwhile>
TF_INLINE void tile_products(const void* a, const void* a1, Index row, const void* b,
                             const Meanwhile& meanwhile) {
  constexpr Index kPanelRow = 4 * kPanel;  // pairs of 16 bits, or four values of 8 bits
  const auto second = [b] { return static_cast<const char*>(b) + kPanelRow / 2; };
  if (kNewB) _tile_loadd(6, b, kPanelRow);
  if (kNewA) _tile_loadd(4, a, row);
  if (kInt8)
    _tile_dpbusd(0, 4, 6);
  else
    _tile_dpbf16ps(0, 4, 6);
  if (kNewB) _tile_loadd(7, second(), kPanelRow);
  if (!kTwo) meanwhile();
  if (kInt8)
    _tile_dpbusd(1, 4, 7);
  else
    _tile_dpbf16ps(1, 4, 7);
  if (!kTwo) return;
  if (kNewA) _tile_loadd(5, a1, row);
  meanwhile();
  if (kInt8) {
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  } else {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Layouts of the operands: A in tiles of 16 rows x 32 values, B in panels of pairs (bf16_pairs.h).
// kComponents is 1 for bfloat16 operands. With 3, fp32 operands are stored as bf16x3
// (bf16_pairs.h), the components of a block next to each other.
template <int kComponents>
class AmxOperands {
  static_assert(kComponents == 1 || kComponents == 3);

 public:
  using Operand = BFloat16;
  using Element = std::conditional_t<kComponents == 1, BFloat16, float>;
  static constexpr bool kIsBf16x3 = kComponents == 3, kRounds = !kIsBf16x3, kQuantizes = false;
  static constexpr bool kPacksInParts = false;
  static constexpr Index kBytes = kComponents * sizeof(Operand);
  static constexpr Index kTile = 16, kTileSize = kTile * kPairDepth;

  static Index depth(Index k) { return pair_depth(k); }
  static Index panel_size(Index k) { return kComponents * kPanel * pair_depth(k); }
  static Index block_size(Index rows, Index k) {
    return kComponents * round_up(rows, kTile) * pair_depth(k);
  }

  // Address of the kPanel values of A from `column` on (a multiple of kPanel) of a row.
  static Operand* chunk(Operand* block, Index k, Index row, Index column) {
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
  static Index pair_row(Index pair, int which) {
    return kIsBf16x3 ? pair / 16 * kPairDepth + pair % 16 + 16 * which : 2 * pair + which;
  }
  static Operand* pair_place(Operand* panel, Index pair) {
    return panel + pair / 16 * kComponents * kPanel * kPairDepth + pair % 16 * 2 * kPanel;
  }
  // Stores two such rows, of finite values, in a panel of B.
  static void put_pair(Operand* panel, Index pair, const Vec (&first)[2], const Vec (&second)[2]) {
    Operand* to = pair_place(panel, pair);
    if constexpr (kIsBf16x3) {
      TF_UNROLL for (int u = 0; u < 2; ++u)
          store_bf16x3<true>(to + u * kPanel, 2 * kTileSize, first[u], second[u]);
    } else {
      TF_UNROLL for (int u = 0; u < 2; ++u) store_interleaved(to + u * kPanel, first[u], second[u]);
    }
  }
  // Stores the rows in a panel of B, and as rows of A as well.
  static void put_both(Operand* first_chunk, Operand* second_chunk, Operand* panel, Index pair,
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
  static float value(const Operand* chunk, Index column) {
    return whole(chunk + (kIsBf16x3 ? place_in_block(column) : column), kTileSize);
  }
  static float element(const Operand* panel, Index k, Index column) {
    const Index block = k / kPairDepth,
                place = kIsBf16x3 ? place_in_block(k % kPairDepth) : k % kPairDepth;
    return whole(panel + block * kPairDepth * kPanel * kComponents + place / 2 * 2 * kPanel +
                     column * 2 + place % 2,
                 2 * kTileSize);
  }

  // Tile by tile: the values of one row are so far apart in the block that they share few cache
  // sets.
  static void fill(const Element* from, Index stride, Index rows, Index k, Operand* block) {
    for (Index tile = 0; tile < rows; tile += kTile) {
      for (Index p = 0; p < k; p += kPanel) {
        for (Index i = tile; i < min(tile + kTile, rows); ++i) {
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
  static void fill_transposed(const Element* from, Index stride, Index depth, Index rows,
                              Operand* block, Index k) {
    for (Index p = 0; p < depth; p += kPairDepth)
      for (Index i = 0; i < rows; i += kTile)
        fill_transposed_tile(from + p * stride + i, stride, min(kPairDepth, depth - p),
                             min(kTile, rows - i), chunk(block, k, i, p));
  }

  static void pack_rows(const Element* rows, Index stride, Index count, Index k, Operand* panel) {
    if constexpr (kIsBf16x3) {
      pack_bf16x3_rows(rows, stride, count, k, panel);
    } else {
      pack_pair_rows(rows, stride, count, k, panel);
    }
  }
  static void pack_columns(const Element* rows, Index stride, Index columns, Index k,
                           Operand* panel) {
    if constexpr (kIsBf16x3) {
      pack_bf16x3_columns(rows, stride, columns, k, panel);
    } else {
      pack_pair_columns(rows, stride, columns, k, panel);
    }
  }

  // Stores 0 in place of numbers that are not representable.
  static void pack_representable_columns(const Element* rows, Index stride, Index columns, Index k,
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
  static void fp32_row(const Read& read, Index k, const Operand* panel, Vec& low, Vec& high) {
    low = high = zero();
    for (Index p = 0; p < k; ++p) {
      const Vec x = set1(read(p));
      const Index block = p / kPairDepth, place = place_in_block(p % kPairDepth);
      Vec b[2];
      load_bf16x3(panel + block * kPairDepth * kPanel * kComponents + place / 2 * 2 * kPanel,
                  2 * kTileSize, place % 2, b);
      low = fma(x, b[0], low);
      high = fma(x, b[1], high);
    }
  }

 private:
  // The sum of the components of an operand, `apart` from each other.
  static float whole(const Operand* operand, Index apart) {
    float sum = load_one(operand);
    for (int piece = 1; piece < kComponents; ++piece) sum += load_one(operand + piece * apart);
    return sum;
  }

  static void fill_transposed_tile(const Element* from, Index stride, Index depth, Index columns,
                                   Operand* tile) {
    if constexpr (kIsBf16x3) {
      alignas(64) float transposed[2][kTile * kTile];
      transpose_floats(from, stride, min(kTile, depth), columns, transposed[0]);
      transpose_floats(from + kTile * stride, stride, depth - kTile, columns, transposed[1]);
      for (Index r = 0; r < kTile; ++r)
        put_finite(tile + r * kPanel, load(transposed[0] + r * kTile),
                   load(transposed[1] + r * kTile));
    } else {
      transpose_pairs(from, stride, depth, columns, tile, kPanel);
    }
  }

  // to[r][j] = j < count ? from[j][r] : 0, for r and j < kTile.
  static void transpose_floats(const float* from, Index stride, Index count, Index columns,
                               float* to) {
    if (columns >= kTile && count == kTile) return transpose_block(from, stride, to, kTile);
    alignas(64) float some[kTile * kTile] = {};
    for (Index j = 0; j < count; ++j)
      store(some + j * kTile, load_some(from + j * stride, columns));
    transpose_block(some, kTile, to, kTile);
  }
};

template <int kComponents>
class AmxProduct : public AmxOperands<kComponents> {
  using Operands = AmxOperands<kComponents>;

 public:
  using Operands::kRounds, Operands::kIsBf16x3, Operands::kTile, Operands::kTileSize;
  using typename Operands::Operand;
  static constexpr Index kBlockRows = kIsBf16x3 ? 96 : 32;
  // Depth of a running sum. With bf16x3 it is rounded 6 times per 32 products, less often than by
  // 128 multiply-adds. A deeper panel would not fit in the second-level cache.
  static constexpr Index kKBlock = kIsBf16x3 ? 512 : 256;
  static constexpr Index kPair = 2 * kTile;
  // Products of components per step. Other work is interleaved between any two: the out-of-order
  // window is a few hundred instructions, and a tile product takes as long as that many.
  static constexpr Index kTerms = kIsBf16x3 ? 6 : 1;
  static constexpr Index kRowsAtOnce = 4;  // rows per call of the sink

  static void enter() { _tile_loadconfig(&kAmxTileConfig); }
  static void leave() { _tile_release(); }

  // Calls sink(row, low, high) with each row of C = A B, in order, while the tiles compute the next
  // rows. Prefetches the data following the panel, finally `next`.
  template <class Sink>
  static void multiply(const Operand* block, Index rows, Index k, const Operand* panel,
                       const Operand* next, float* buffer, const Sink& sink, Index = kPanel) {
    const Index depth = pair_depth(k);
    if (depth == 0 || rows == 0) {
      for (Index i = 0; i < rows; ++i) sink(i, zero(), zero());
      return;
    }
    const Index pairs = (rows + kPair - 1) / kPair;
    const auto sums = [&](Index pair) {
      return buffer + kPair * kPanel * (depth > kKBlock ? pair : pair % 2);
    };
    compiler_barrier();
    for (Index p = 0; p < depth; p += kKBlock) {
      const Index steps = min(kKBlock, depth - p) / kPairDepth;
      const bool last = p + kKBlock >= depth;
      const char* ahead =
          reinterpret_cast<const char*>(last ? next : panel + (p + kKBlock) * kPanel * kComponents);
      const Index calls = steps * kTerms;
      const Index lines = (kComponents * kPairDepth * steps + pairs * calls - 1) / (pairs * calls);
      for (Index pair = 0; pair < pairs; ++pair) {
        const float* finished = sums(max(0, pair - 1));
        const auto to_sink = [&](Index begin, Index end) __attribute__((always_inline)) {
          sink_rows(sink, finished, (pair - 1) * kPair, begin, end);
        };
        Interleaver rows_to_sink(last && pair > 0 ? kPair : 0, calls, kRowsAtOnce);
        multiply_pair(block + (pair * kPair * depth + p * kTile) * kComponents, depth,
                      rows - pair * kPair, panel + p * kPanel * kComponents, steps, p > 0,
                      sums(pair), kPanel, [&](Index) __attribute__((always_inline)) {
                        for (Index line = 0; line < lines; ++line, ahead += 64) prefetch_l2(ahead);
                        rows_to_sink(to_sink);
                      });
        rows_to_sink.finish(to_sink);
      }
    }
    const Index from = (pairs - 1) * kPair;
    sink_rows(sink, sums(pairs - 1), from, 0, rows - from);
  }
  // Size of `buffer` in floats.
  static Index buffer_size(Index rows) { return round_up(rows, kPair) * kPanel; }

  // C = A B, or C += A B, with the first k of block_k columns of A. C has round_up(rows, 16) rows,
  // c_stride apart. Calls meanwhile() between tile products, steps(rows, k) times in total.
  template <class Meanwhile>
  static void multiply_to(const Operand* block, Index block_k, Index rows, Index k,
                          const Operand* panel, bool accumulate, float* c, Index c_stride,
                          const Meanwhile& meanwhile, const Operand* = nullptr) {
    const Index block_depth = pair_depth(block_k), depth = pair_depth(k);
    compiler_barrier();
    Index p = 0;
    do {
      for (Index i = 0; i < rows; i += kPair)
        multiply_pair(block + (i * block_depth + p * kTile) * kComponents, block_depth, rows - i,
                      panel + p * kPanel * kComponents, min(kKBlock, depth - p) / kPairDepth,
                      accumulate || p > 0, c + i * c_stride, c_stride,
                      [&](Index) __attribute__((always_inline)) { meanwhile(); });
      p += kKBlock;
    } while (p < depth);  // depth 0 clears C
  }
  static Index steps(Index rows, Index k) {
    return (rows + kPair - 1) / kPair * (pair_depth(k) / kPairDepth) * kTerms;
  }

  // Building blocks of multiply(), for kernels with another order of work: sums of 16 rows, or 32
  // with kTwo, by kPanel columns, which stay in tiles until they are stored.
  template <bool kTwo>
  TF_INLINE static void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  template <bool kTwo>
  TF_INLINE static void load_sums(const float* c, Index c_stride) {
    const Index c_row = c_stride * static_cast<Index>(sizeof(float));
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + kLanes, c_row);
    if (kTwo) {
      const float* c1 = c + kTile * c_stride;
      _tile_loadd(2, c1, c_row);
      _tile_loadd(3, c1 + kLanes, c_row);
    }
  }
  template <bool kTwo>
  TF_INLINE static void store_sums(float* c, Index c_stride) {
    const Index c_row = c_stride * static_cast<Index>(sizeof(float));
    _tile_stored(0, c, c_row);
    _tile_stored(1, c + kLanes, c_row);
    if (kTwo) {
      float* c1 = c + kTile * c_stride;
      _tile_stored(2, c1, c_row);
      _tile_stored(3, c1 + kLanes, c_row);
    }
  }
  // Adds the products of `steps` tiles of A, whose rows have depth `depth`, and of a panel. Calls
  // meanwhile(i) between tile products, kTerms times per step.
  template <bool kTwo, class Meanwhile>
  TF_INLINE static void add_products(const Operand* a, Index depth, const Operand* b, Index steps,
                                     const Meanwhile& meanwhile) {
    const Operand* a1 = a + kTile * depth * kComponents;
    for (Index step = 0; step < steps; ++step) {
      keep_avx512_active();
      if constexpr (kIsBf16x3) {
        // Adjacent terms share a component, so that only two tiles are loaded for each.
        const auto then = [&](Index i) __attribute__((always_inline)) {
          return [&meanwhile, i]() __attribute__((always_inline)) { meanwhile(i); };
        };
        term<kTwo, true, true>(a, a1, b, 0, 2, then(step * kTerms));
        term<kTwo, false, true>(a, a1, b, 0, 1, then(step * kTerms + 1));
        term<kTwo, true, false>(a, a1, b, 1, 1, then(step * kTerms + 2));
        term<kTwo, false, true>(a, a1, b, 1, 0, then(step * kTerms + 3));
        term<kTwo, true, false>(a, a1, b, 2, 0, then(step * kTerms + 4));
        term<kTwo, true, false>(a, a1, b, 0, 0, then(step * kTerms + 5));
      } else {
        term<kTwo, true, true>(a, a1, b, 0, 0, [] {});
        meanwhile(step);
      }
      a += kTileSize * kComponents;
      a1 += kTileSize * kComponents;
      b += 2 * kTileSize * kComponents;
    }
  }
  // Adds the sums to C.
  template <bool kTwo>
  TF_INLINE static void add_sums(float* c, Index c_stride) {
    alignas(64) float sums[kPair * kPanel];
    constexpr Index kRow = kPanel * sizeof(float);
    _tile_stored(0, sums, kRow);
    _tile_stored(1, sums + kLanes, kRow);
    if (kTwo) {
      _tile_stored(2, sums + kTile * kPanel, kRow);
      _tile_stored(3, sums + kTile * kPanel + kLanes, kRow);
    }
    compiler_barrier();
    for (Index i = 0; i < (kTwo ? kPair : kTile); ++i) {
      float* row = c + i * c_stride;
      store(row, load(row) + load(sums + i * kPanel));
      store(row + kLanes, load(row + kLanes) + load(sums + i * kPanel + kLanes));
    }
  }

 private:
  // Passes rows [begin, end) of a pair of tiles to the sink; the copy of the sink stays in
  // registers.
  template <class Sink>
  [[gnu::noinline]] static void sink_rows(const Sink& sink, const float* sums, Index row,
                                          Index begin, Index end) {
    const Sink mine = sink;
    for (Index i = begin; i < end; ++i)
      mine(row + i, load(sums + i * kPanel), load(sums + i * kPanel + kLanes));
  }

  // Two tiles of rows, or one if no more are left.
  template <class Meanwhile>
  TF_INLINE static void multiply_pair(const Operand* a, Index depth, Index left, const Operand* b,
                                      Index steps, bool accumulate, float* c, Index c_stride,
                                      const Meanwhile& meanwhile) {
    if (left > kTile) {
      multiply_tiles<true>(a, depth, b, steps, accumulate, c, c_stride, meanwhile);
    } else {
      multiply_tiles<false>(a, depth, b, steps, accumulate, c, c_stride, meanwhile);
    }
  }

  template <bool kTwo, class Meanwhile>
  TF_INLINE static void multiply_tiles(const Operand* a, Index depth, const Operand* b, Index steps,
                                       bool accumulate, float* c, Index c_stride,
                                       const Meanwhile& meanwhile) {
    // Sums over kKBlock that are then added are more accurate than one long running sum.
    const bool apart = kIsBf16x3 && accumulate;
    if (accumulate && !apart) {
      load_sums<kTwo>(c, c_stride);
    } else {
      clear_sums<kTwo>();
    }
    add_products<kTwo>(a, depth, b, steps, meanwhile);
    if (apart) {
      add_sums<kTwo>(c, c_stride);
    } else {
      store_sums<kTwo>(c, c_stride);
    }
  }

  // The product of component `of_a` of the rows and component `of_b` of the panel.
  template <bool kTwo, bool kNewA, bool kNewB, class Meanwhile>
  TF_INLINE static void term(const Operand* a, const Operand* a1, const Operand* b, int of_a,
                             int of_b, const Meanwhile& meanwhile) {
    constexpr Index kRow = kPanel * sizeof(Operand);
    tile_products<false, kTwo, kNewA, kNewB>(a + of_a * kTileSize, a1 + of_a * kTileSize, kRow,
                                             b + of_b * 2 * kTileSize, meanwhile);
  }
};

}  // namespace
}  // namespace tf::TF_ISA
