// bfloat16 panels for vdpbf16ps and AMX, which multiply pairs of adjacent k (VNNI layout): panel[k
// / 2] holds kPanel columns of (B[k], B[k + 1]). The depth is padded with zeros to a multiple of
// kPairDepth. For kernel files built with AVX-512-BF16.
#pragma once

#include "cpu/gemm/gemm.h"
#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

constexpr Index kPairDepth = 32;  // 16 pairs: a 16 x 16 block of words to transpose, one AMX tile

TF_INLINE Index pair_depth(Index k) { return round_up(k, kPairDepth); }

// The first n of 32 values; the others are 0.
TF_INLINE __m512i load_values(const BFloat16* p, Index n) {
  const __mmask32 mask = n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1u;
  return _mm512_maskz_loadu_epi16(mask, p);
}

// A panel of B = W^T from `count` rows of W: (B[p], B[p + 1])[j] = rows[j][p, p + 1].
TF_INLINE void pack_pair_rows(const BFloat16* rows, Index stride, Index count, Index k,
                              BFloat16* panel) {
  float block[16 * 16];
  for (Index p = 0; p < k; p += kPairDepth) {
    for (Index half = 0; half < kPanel; half += 16) {
      const BFloat16* from = rows + half * stride + p;
      float* to = reinterpret_cast<float*>(panel + p * kPanel + half * 2);
      if (stride % 2 == 0 && p + kPairDepth <= k && half + 16 <= count) {
        transpose_block(reinterpret_cast<const float*>(from), stride / 2, to, kPanel);
      } else {
        for (Index j = 0; j < 16; ++j)
          _mm512_storeu_si512(block + 16 * j,
                              load_values(from + j * stride, half + j < count ? k - p : 0));
        transpose_block(block, 16, to, kPanel);
      }
    }
  }
}

// A panel of B from its rows: k of them, `columns` <= kPanel values in each.
TF_INLINE void pack_pair_columns(const BFloat16* rows, Index stride, Index columns, Index k,
                                 BFloat16* panel) {
  for (Index p = 0; p < pair_depth(k); p += 2) {
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
TF_INLINE void transpose_pairs(const BFloat16* rows, Index stride, Index depth, Index columns,
                               BFloat16* to, Index to_stride) {
  alignas(64) float block[16 * 16];
  const __mmask16 some = first_lanes(columns);
  const auto row = [&](Index j) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(j < depth ? some : 0, rows + j * stride));
  };
  for (Index pair = 0; pair < 16; ++pair)
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

// bf16x3: fp32 as a sum of three bfloat16 components, to multiply fp32 on bfloat16 units: 8 + 8 + 8
// bits of significand are fp32's 24. The first component is truncated, so it cannot overflow; the
// second is rounded, so the third has either sign and the omitted products have no bias. Infinity
// is a first component followed by zeros. The order of a product's terms is free, so the pairs of a
// block of kPairDepth are the values j and 16 + j, whose components combine without a shuffle. AMX
// treats numbers below 2^-126 as 0, and with them the lower components of numbers up to 2^-110.
constexpr int kSplitComponents = 3;

// Whether x is not the sum of its components: infinity, NaN, and small nonzero numbers.
constexpr float kSmall = 0x1p-108f;
TF_INLINE Mask not_bf16x3(Vec x) {
  const Mask small = less(max(x, zero() - x), set1(kSmall));
  return static_cast<Mask>((small & ~equal(x, zero())) | is_nan(x - x));
}

TF_INLINE bool not_bf16x3(float x) {
  return !(x - x == 0.0f) || (x != 0.0f && x < kSmall && x > -kSmall);
}

// Whether any of the numbers added was not representable as bf16x3.
class Bf16x3RangeCheck {
 public:
  TF_INLINE void add(Vec x) {
    const __m512i bits = _mm512_castps_si512(x), size = _mm512_set1_epi32(0x7fffffff);
    // The bits of positive floats order like the floats; those below the smallest representable
    // number wrap around.
    max_ = _mm512_max_epu32(max_, _mm512_maskz_sub_epi32(_mm512_test_epi32_mask(bits, size),
                                                         _mm512_and_si512(bits, size), small()));
  }
  bool any() const {
    const __m512i infinity = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpge_epu32_mask(max_, _mm512_sub_epi32(infinity, small())) != 0;
  }

 private:
  static __m512i small() { return _mm512_castps_si512(set1(kSmall)); }
  __m512i max_ = _mm512_setzero_si512();
};

// The components of x, in the upper half of each lane.
TF_INLINE void split_bf16x3(Vec x, __m512i (&piece)[kSplitComponents]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  constexpr int kInfinite = 0x18;
  const Mask finite = static_cast<Mask>(~_mm512_fpclass_ps_mask(x, kInfinite));
  piece[0] = _mm512_castps_si512(x);
  const Vec rest =
      _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(_mm512_and_si512(piece[0], upper)));
  piece[1] = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
  piece[2] = _mm512_castps_si512(rest - _mm512_castsi512_ps(_mm512_and_si512(piece[1], upper)));
}

// The same for finite x multiplied by components that were rounded: truncating the second component
// as well leaves a bias of at most 2^-25.
TF_INLINE void split_bf16x3_finite(Vec x, __m512i (&piece)[kSplitComponents]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  TF_UNROLL for (int i = 0; i < kSplitComponents; ++i) {
    piece[i] = _mm512_castps_si512(x);
    x = x - _mm512_castsi512_ps(_mm512_and_si512(piece[i], upper));
  }
}

// Combines the upper halves of the lanes of low and high into pairs.
TF_INLINE __m512i pairs(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), high);
}
TF_INLINE void store_pairs(BFloat16* to, __m512i low, __m512i high) {
  _mm512_storeu_si512(to, pairs(low, high));
}

// Position of value j in a block of kPairDepth.
TF_INLINE Index place_in_block(Index j) { return j % 16 * 2 + j / 16; }

// Stores kPanel values, their components `apart` from each other.
template <bool kFinite = false>
TF_INLINE void store_bf16x3(BFloat16* to, Index apart, Vec low, Vec high) {
  __m512i l[kSplitComponents], h[kSplitComponents];
  if constexpr (kFinite) {
    split_bf16x3_finite(low, l);
    split_bf16x3_finite(high, h);
  } else {
    split_bf16x3(low, l);
    split_bf16x3(high, h);
  }
  TF_UNROLL for (int i = 0; i < kSplitComponents; ++i) store_pairs(to + i * apart, l[i], h[i]);
}

// pack_pair_rows() for each component, in blocks of kPairDepth.
TF_INLINE void pack_bf16x3_rows(const float* rows, Index stride, Index count, Index k,
                                BFloat16* panel) {
  constexpr Index kBlock = kPanel * kPairDepth;
  BFloat16 components[kSplitComponents * kBlock];
  for (Index p = 0; p < k; p += kPairDepth, panel += kSplitComponents * kBlock) {
    const Index left = k - p;
    for (Index j = 0; j < count; ++j) {
      const float* row = rows + j * stride + p;
      store_bf16x3(components + j * kPairDepth, kBlock, load_some(row, min(kLanes, left)),
                   left > kLanes ? load_some(row + kLanes, left - kLanes) : zero());
    }
    for (int i = 0; i < kSplitComponents; ++i)
      pack_pair_rows(components + i * kBlock, kPairDepth, count, kPairDepth, panel + i * kBlock);
  }
}

// Row `pair` of pairs of a panel of B, as bf16x3, from B's rows: k of them, `columns` values each.
// With kRepresentableOnly, 0 in place of numbers that are not representable.
template <bool kRepresentableOnly = false>
TF_INLINE void pack_bf16x3_pair(const float* rows, Index stride, Index columns, Index k, Index pair,
                                BFloat16* panel) {
  constexpr Index kBlock = kPanel * kPairDepth;
  const Index p = pair / 16 * kPairDepth + pair % 16;
  BFloat16* to = panel + pair / 16 * kSplitComponents * kBlock + pair % 16 * 2 * kPanel;
  TF_UNROLL for (Index j = 0; j < kPanel; j += kLanes) {
    const auto read = [&](Index row) __attribute__((always_inline)) {
      if (row >= k || j >= columns) return zero();
      const Vec x = load_some(rows + row * stride + j, columns - j);
      return kRepresentableOnly ? select(not_bf16x3(x), zero(), x) : x;
    };
    __m512i low[kSplitComponents], high[kSplitComponents];
    split_bf16x3(read(p), low);
    split_bf16x3(read(p + 16), high);
    TF_UNROLL for (int i = 0; i < kSplitComponents; ++i)
        store_pairs(to + i * kBlock + 2 * j, low[i], high[i]);
  }
}

// pack_pair_columns() for each component, in blocks of kPairDepth.
template <bool kRepresentableOnly = false>
TF_INLINE void pack_bf16x3_columns(const float* rows, Index stride, Index columns, Index k,
                                   BFloat16* panel) {
  for (Index pair = 0; pair < pair_depth(k) / 2; ++pair)
    pack_bf16x3_pair<kRepresentableOnly>(rows, stride, columns, k, pair, panel);
}

// The kPanel first (which = 0) or second values of a row of pairs.
TF_INLINE void load_bf16x3(const BFloat16* pairs, Index apart, Index which, Vec (&x)[2]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  TF_UNROLL for (int u = 0; u < 2; ++u) {
    x[u] = zero();
    TF_UNROLL for (int i = 0; i < kSplitComponents; ++i) {
      const __m512i both = _mm512_loadu_si512(pairs + i * apart + u * kPanel);
      x[u] = x[u] + _mm512_castsi512_ps(which == 0 ? _mm512_slli_epi32(both, 16)
                                                   : _mm512_and_si512(both, upper));
    }
  }
}

}  // namespace
}  // namespace tf::TF_ISA
