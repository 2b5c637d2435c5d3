// bfloat16 panels for vdpbf16ps and AMX, which multiply pairs of adjacent k (VNNI layout): panel[k
// / 2] holds kPanel columns of (B[k], B[k + 1]). The depth is padded with zeros to a multiple of
// kPairDepth. For kernel files built with AVX-512-BF16.
#pragma once

#include "cpu/gemm/gemm.h"
#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

constexpr long kPairDepth = 32;  // 16 pairs: a 16 x 16 block of words to transpose, one AMX tile

TF_INLINE long pair_depth(long k) { return round_up(k, kPairDepth); }

// The first n of 32 values; the others are 0.
TF_INLINE __m512i load_values(const BFloat16* p, long n) {
  const __mmask32 mask = n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1u;
  return _mm512_maskz_loadu_epi16(mask, p);
}

// A panel of B = W^T from `count` rows of W: (B[p], B[p + 1])[j] = rows[j][p, p + 1].
TF_INLINE void pack_pair_rows(const BFloat16* rows, long stride, long count, long k,
                              BFloat16* panel) {
  float block[16 * 16];
  for (long p = 0; p < k; p += kPairDepth) {
    for (long half = 0; half < kPanel; half += 16) {
      const BFloat16* from = rows + half * stride + p;
      float* to = reinterpret_cast<float*>(panel + p * kPanel + half * 2);
      if (stride % 2 == 0 && p + kPairDepth <= k && half + 16 <= count) {
        transpose_block(reinterpret_cast<const float*>(from), stride / 2, to, kPanel);
      } else {
        for (long j = 0; j < 16; ++j)
          _mm512_storeu_si512(block + 16 * j,
                              load_values(from + j * stride, half + j < count ? k - p : 0));
        transpose_block(block, 16, to, kPanel);
      }
    }
  }
}

// A panel of B from its rows: k of them, `columns` <= kPanel values in each.
TF_INLINE void pack_pair_columns(const BFloat16* rows, long stride, long columns, long k,
                                 BFloat16* panel) {
  for (long p = 0; p < pair_depth(k); p += 2) {
    const __m512i even = load_values(rows + p * stride, p < k ? columns : 0);
    const __m512i odd = load_values(rows + (p + 1) * stride, p + 1 < k ? columns : 0);
    const auto widen = [](__m256i x) { return _mm512_cvtepu16_epi32(x); };
    const auto join = [&](__m256i low, __m256i high) {
      return _mm512_or_si512(widen(low), _mm512_slli_epi32(widen(high), 16));
    };
    _mm512_storeu_si512(panel + p * kPanel,
                        join(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd)));
    _mm512_storeu_si512(panel + p * kPanel + kPanel, join(_mm512_extracti64x4_epi64(even, 1),
                                                          _mm512_extracti64x4_epi64(odd, 1)));
  }
}

// Columns of a tensor as rows: to[i][j] = rows[j][i] for i < 16, j < kPairDepth, rows of `to`
// to_stride (even) apart; 0 where j >= depth or i >= columns.
TF_INLINE void transpose_pairs(const BFloat16* rows, long stride, long depth, long columns,
                               BFloat16* to, long to_stride) {
  alignas(64) float block[16 * 16];
  const __mmask16 some = first_lanes(columns);
  const auto row = [&](long j) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(j < depth ? some : 0, rows + j * stride));
  };
  for (long pair = 0; pair < 16; ++pair)
    _mm512_store_si512(block + 16 * pair,
                       _mm512_or_si512(row(2 * pair), _mm512_slli_epi32(row(2 * pair + 1), 16)));
  transpose_block(block, 16, reinterpret_cast<float*>(to), to_stride / 2);
}

// kPanel values rounded to bfloat16, in order.
TF_INLINE void store_rounded(BFloat16* to, Vec low, Vec high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Adds the values, after the same rounding, to sums, two per lane.
TF_INLINE Vec add_rounded(Vec sums, Vec low, Vec high) {
  const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  return _mm512_dpbf16_ps(sums, _mm512_cvtne2ps_pbh(high, low), ones);
}

// Rounds to bfloat16 and interleaves: pairs of (first, second).
TF_INLINE void store_interleaved(BFloat16* to, Vec first, Vec second) {
  const __m512i even = (__m512i)_mm512_cvtne2ps_pbh(second, first);  // first in the lower half
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(even));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(even, 1));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

}  // namespace
}  // namespace tf::TF_ISA
