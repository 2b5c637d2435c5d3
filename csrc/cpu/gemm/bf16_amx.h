// GEMM on AMX tiles (Intel SDM volume 1, chapter 18): C (m x kPanel) = A B with fp32 sums. Two by
// two accumulators share two tiles of A and two of B, so that each loaded tile is used twice. For
// kernel files only.
//
// With kComponents = 3, a product is the sum of the six products of components that contribute to
// fp32 precision (bf16x3). It is 2.5 times as fast as fp32 FMA and as accurate: products of
// components are exact, and sums are rounded once per 32 of them.
#pragma once

#include "cpu/gemm/bf16_amx_operands.h"
#include "cpu/gemm/interleave.h"

namespace tf::TF_ISA {
namespace {

// Palette 1, all eight tiles 16 rows of 64 bytes.
struct alignas(64) AmxTileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Static: the intrinsic tells GCC of 8 bytes only, so stores to a local one would be dropped.
constexpr AmxTileConfig kAmxTileConfig;

// Compiler barrier: GCC does not know what tile loads read, so stores must not be moved behind
// them.
TF_INLINE void compiler_barrier() { asm volatile("" ::: "memory"); }

// After about 2,000 cycles without 512-bit floating-point work the processor powers that unit down,
// and the next tile store waits 1,000 cycles for it (measured on a Xeon with AMX).
TF_INLINE void keep_avx512_active() {
  __m512 any;
  asm volatile("vaddps %1, %1, %0" : "=v"(any) : "v"(_mm512_setzero_ps()));
}

template <int kComponents>
class AmxProduct : public AmxOperands<kComponents> {
  using Operands = AmxOperands<kComponents>;

 public:
  using Operands::kRounds, Operands::kIsBf16x3, Operands::kTile, Operands::kTileSize;
  using typename Operands::Operand;
  static constexpr long kBlockRows = kIsBf16x3 ? 96 : 32;
  // Depth of a running sum. With bf16x3 it is rounded 6 times per 32 products, less often than by
  // 128 multiply-adds. A deeper panel would not fit in the second-level cache.
  static constexpr long kKBlock = kIsBf16x3 ? 512 : 256;
  static constexpr long kPair = 2 * kTile;
  // Products of components per step. Other work is interleaved between any two: the out-of-order
  // window is a few hundred instructions, and a tile product takes as long as that many.
  static constexpr long kTerms = kIsBf16x3 ? 6 : 1;
  static constexpr long kRowsAtOnce = 4;  // rows per call of the sink

  static void enter() { _tile_loadconfig(&kAmxTileConfig); }
  static void leave() { _tile_release(); }

  // Calls sink(row, low, high) with each row of C = A B, in order, while the tiles compute the next
  // rows. Prefetches the data following the panel, finally `next`.
  template <class Sink>
  static void multiply(const Operand* block, long rows, long k, const Operand* panel,
                       const Operand* next, float* buffer, const Sink& sink, long = kPanel) {
    const long depth = pair_depth(k);
    if (depth == 0 || rows == 0) {
      for (long i = 0; i < rows; ++i) sink(i, zero(), zero());
      return;
    }
    const long pairs = (rows + kPair - 1) / kPair;
    const auto sums = [&](long pair) {
      return buffer + kPair * kPanel * (depth > kKBlock ? pair : pair % 2);
    };
    compiler_barrier();
    for (long p = 0; p < depth; p += kKBlock) {
      const long steps = min(kKBlock, depth - p) / kPairDepth;
      const bool last = p + kKBlock >= depth;
      const char* ahead =
          reinterpret_cast<const char*>(last ? next : panel + (p + kKBlock) * kPanel * kComponents);
      const long calls = steps * kTerms;
      const long lines = (kComponents * kPairDepth * steps + pairs * calls - 1) / (pairs * calls);
      for (long pair = 0; pair < pairs; ++pair) {
        const float* finished = sums(max(0, pair - 1));
        const auto to_sink = [&](long begin, long end) __attribute__((always_inline)) {
          sink_rows(sink, finished, (pair - 1) * kPair, begin, end);
        };
        Interleaver rows_to_sink(last && pair > 0 ? kPair : 0, calls, kRowsAtOnce);
        multiply_pair(block + (pair * kPair * depth + p * kTile) * kComponents, depth,
                      rows - pair * kPair, panel + p * kPanel * kComponents, steps, p > 0,
                      sums(pair), kPanel, [&](long) __attribute__((always_inline)) {
                        for (long line = 0; line < lines; ++line, ahead += 64)
                          _mm_prefetch(ahead, _MM_HINT_T1);
                        rows_to_sink(to_sink);
                      });
        rows_to_sink.finish(to_sink);
      }
    }
    const long from = (pairs - 1) * kPair;
    sink_rows(sink, sums(pairs - 1), from, 0, rows - from);
  }
  // Size of `buffer` in floats.
  static long buffer_size(long rows) { return round_up(rows, kPair) * kPanel; }

  // C = A B, or C += A B, with the first k of block_k columns of A. C has round_up(rows, 16) rows,
  // c_stride apart. Calls meanwhile() between tile products, steps(rows, k) times in total.
  template <class Meanwhile>
  static void multiply_to(const Operand* block, long block_k, long rows, long k,
                          const Operand* panel, bool accumulate, float* c, long c_stride,
                          const Meanwhile& meanwhile, const Operand* = nullptr) {
    const long block_depth = pair_depth(block_k), depth = pair_depth(k);
    compiler_barrier();
    long p = 0;
    do {
      for (long i = 0; i < rows; i += kPair)
        multiply_pair(block + (i * block_depth + p * kTile) * kComponents, block_depth, rows - i,
                      panel + p * kPanel * kComponents, min(kKBlock, depth - p) / kPairDepth,
                      accumulate || p > 0, c + i * c_stride, c_stride,
                      [&](long) __attribute__((always_inline)) { meanwhile(); });
      p += kKBlock;
    } while (p < depth);  // depth 0 clears C
  }
  static long steps(long rows, long k) {
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
  TF_INLINE static void load_sums(const float* c, long c_stride) {
    const long c_row = c_stride * static_cast<long>(sizeof(float));
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + kLanes, c_row);
    if (kTwo) {
      const float* c1 = c + kTile * c_stride;
      _tile_loadd(2, c1, c_row);
      _tile_loadd(3, c1 + kLanes, c_row);
    }
  }
  template <bool kTwo>
  TF_INLINE static void store_sums(float* c, long c_stride) {
    const long c_row = c_stride * static_cast<long>(sizeof(float));
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
  TF_INLINE static void add_products(const Operand* a, long depth, const Operand* b, long steps,
                                     const Meanwhile& meanwhile) {
    const Operand* a1 = a + kTile * depth * kComponents;
    for (long step = 0; step < steps; ++step) {
      keep_avx512_active();
      if constexpr (kIsBf16x3) {
        // Adjacent terms share a component, so that only two tiles are loaded for each.
        const auto then = [&](long i) __attribute__((always_inline)) {
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
  TF_INLINE static void add_sums(float* c, long c_stride) {
    alignas(64) float sums[kPair * kPanel];
    constexpr long kRow = kPanel * sizeof(float);
    _tile_stored(0, sums, kRow);
    _tile_stored(1, sums + kLanes, kRow);
    if (kTwo) {
      _tile_stored(2, sums + kTile * kPanel, kRow);
      _tile_stored(3, sums + kTile * kPanel + kLanes, kRow);
    }
    compiler_barrier();
    for (long i = 0; i < (kTwo ? kPair : kTile); ++i) {
      float* row = c + i * c_stride;
      store(row, load(row) + load(sums + i * kPanel));
      store(row + kLanes, load(row + kLanes) + load(sums + i * kPanel + kLanes));
    }
  }

 private:
  // Passes rows [begin, end) of a pair of tiles to the sink; the copy of the sink stays in
  // registers.
  template <class Sink>
  [[gnu::noinline]] static void sink_rows(const Sink& sink, const float* sums, long row, long begin,
                                          long end) {
    const Sink mine = sink;
    for (long i = begin; i < end; ++i)
      mine(row + i, load(sums + i * kPanel), load(sums + i * kPanel + kLanes));
  }

  // Two tiles of rows, or one if no more are left.
  template <class Meanwhile>
  TF_INLINE static void multiply_pair(const Operand* a, long depth, long left, const Operand* b,
                                      long steps, bool accumulate, float* c, long c_stride,
                                      const Meanwhile& meanwhile) {
    if (left > kTile) {
      multiply_tiles<true>(a, depth, b, steps, accumulate, c, c_stride, meanwhile);
    } else {
      multiply_tiles<false>(a, depth, b, steps, accumulate, c, c_stride, meanwhile);
    }
  }

  template <bool kTwo, class Meanwhile>
  TF_INLINE static void multiply_tiles(const Operand* a, long depth, const Operand* b, long steps,
                                       bool accumulate, float* c, long c_stride,
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

  // The product of component `of_a` of the rows and component `of_b` of the panel, loaded if new.
  // Loads are issued before meanwhile(): otherwise they wait for its stores.
  template <bool kTwo, bool kNewA, bool kNewB, class Meanwhile>
  TF_INLINE static void term(const Operand* a, const Operand* a1, const Operand* b, int of_a,
                             int of_b, const Meanwhile& meanwhile) {
    constexpr long kRow = kPanel * sizeof(Operand), kPairRow = 2 * kPanel * sizeof(Operand);
    a += of_a * kTileSize;
    a1 += of_a * kTileSize;
    b += of_b * 2 * kTileSize;
    if (kNewB) _tile_loadd(6, b, kPairRow);
    if (kNewA) _tile_loadd(4, a, kRow);
    _tile_dpbf16ps(0, 4, 6);
    if (kNewB) _tile_loadd(7, b + kPanel, kPairRow);
    if (!kTwo) meanwhile();
    _tile_dpbf16ps(1, 4, 7);
    if (!kTwo) return;
    if (kNewA) _tile_loadd(5, a1, kRow);
    meanwhile();
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

}  // namespace
}  // namespace tf::TF_ISA
