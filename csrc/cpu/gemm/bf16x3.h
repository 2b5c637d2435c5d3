// fp32 as a sum of three bfloat16 pieces, to multiply it on bfloat16 units: 8 + 8 + 8 bits of
// significand are fp32's 24. The first piece is cut off, so it cannot overflow; the second is
// rounded, so the third has either sign and products left out have no bias. Infinity is a first
// piece with nothing behind it. A product does not ask in which order its terms come: the pairs of
// a block of kPairDepth are the values j and 16 + j, whose pieces join without a shuffle. Tiles
// take numbers below 2^-126 for 0, and with them the lower pieces of numbers up to 2^-110. For
// kernel files built with AVX-512-BF16.
#pragma once

#include "cpu/gemm/bf16_pairs.h"

namespace tf::TF_ISA {
namespace {

constexpr int kSplitComponents = 3;

// Whether x is not a number whose pieces stand for it: infinity, NaN, and all but 0 that is small.
constexpr float kSmall = 0x1p-108f;
TF_INLINE Mask not_bf16x3(Vec x) {
  const Mask small = less(max(x, zero() - x), set1(kSmall));
  return static_cast<Mask>((small & ~equal(x, zero())) | is_nan(x - x));
}

TF_INLINE bool not_bf16x3(float x) {
  return !(x - x == 0.0f) || (x != 0.0f && x < kSmall && x > -kSmall);
}

// Whether any number so far was such a one.
class Bf16x3RangeCheck {
 public:
  TF_INLINE void add(Vec x) {
    const __m512i bits = _mm512_castps_si512(x), size = _mm512_set1_epi32(0x7fffffff);
    // The bits of positive floats are in the floats' order; below the smallest they wrap around.
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

// The upper halves of each lane are the pieces of x.
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

// The same for finite x that meet rounded pieces: cutting the second off as well leaves a bias of
// 2^-25 at most.
TF_INLINE void split_bf16x3_finite(Vec x, __m512i (&piece)[kSplitComponents]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  TF_UNROLL for (int i = 0; i < kSplitComponents; ++i) {
    piece[i] = _mm512_castps_si512(x);
    x = x - _mm512_castsi512_ps(_mm512_and_si512(piece[i], upper));
  }
}

// Pairs of the upper halves of the lanes of low and high.
TF_INLINE __m512i pairs(__m512i low, __m512i high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), high);
}

// Where value j of a block of kPairDepth is.
TF_INLINE long place_in_block(long j) { return j % 16 * 2 + j / 16; }

// kPanel values, pieces `apart`.
template <bool kFinite = false>
TF_INLINE void store_bf16x3(BFloat16* to, long apart, Vec low, Vec high) {
  __m512i l[kSplitComponents], h[kSplitComponents];
  if constexpr (kFinite) {
    split_bf16x3_finite(low, l);
    split_bf16x3_finite(high, h);
  } else {
    split_bf16x3(low, l);
    split_bf16x3(high, h);
  }
  TF_UNROLL for (int i = 0; i < kSplitComponents; ++i)
      _mm512_storeu_si512(to + i * apart, pairs(l[i], h[i]));
}

// pack_pair_rows() for each piece, block by block of kPairDepth.
TF_INLINE void pack_bf16x3_rows(const float* rows, long stride, long count, long k,
                                BFloat16* panel) {
  constexpr long kBlock = kPanel * kPairDepth;
  BFloat16 components[kSplitComponents * kBlock];
  for (long p = 0; p < k; p += kPairDepth, panel += kSplitComponents * kBlock) {
    const long left = k - p;
    for (long j = 0; j < count; ++j) {
      const float* row = rows + j * stride + p;
      store_bf16x3(components + j * kPairDepth, kBlock, load_some(row, min(kLanes, left)),
                   left > kLanes ? load_some(row + kLanes, left - kLanes) : zero());
    }
    for (int i = 0; i < kSplitComponents; ++i)
      pack_pair_rows(components + i * kBlock, kPairDepth, count, kPairDepth, panel + i * kBlock);
  }
}

// Row `pair` of the pairs of a panel of B, in pieces, from B's rows: k of them, `columns` values in
// each. With 0 in place of numbers without pieces if kRepresentableOnly.
template <bool kRepresentableOnly = false>
TF_INLINE void pack_bf16x3_pair(const float* rows, long stride, long columns, long k, long pair,
                                BFloat16* panel) {
  constexpr long kBlock = kPanel * kPairDepth;
  const long p = pair / 16 * kPairDepth + pair % 16;
  BFloat16* to = panel + pair / 16 * kSplitComponents * kBlock + pair % 16 * 2 * kPanel;
  TF_UNROLL for (long j = 0; j < kPanel; j += kLanes) {
    const auto read = [&](long row) __attribute__((always_inline)) {
      if (row >= k || j >= columns) return zero();
      const Vec x = load_some(rows + row * stride + j, columns - j);
      return kRepresentableOnly ? select(not_bf16x3(x), zero(), x) : x;
    };
    __m512i low[kSplitComponents], high[kSplitComponents];
    split_bf16x3(read(p), low);
    split_bf16x3(read(p + 16), high);
    TF_UNROLL for (int i = 0; i < kSplitComponents; ++i)
        _mm512_storeu_si512(to + i * kBlock + 2 * j, pairs(low[i], high[i]));
  }
}

// pack_pair_columns() for each piece, block by block of kPairDepth.
template <bool kRepresentableOnly = false>
TF_INLINE void pack_bf16x3_columns(const float* rows, long stride, long columns, long k,
                                   BFloat16* panel) {
  for (long pair = 0; pair < pair_depth(k) / 2; ++pair)
    pack_bf16x3_pair<kRepresentableOnly>(rows, stride, columns, k, pair, panel);
}

// The kPanel first (which = 0) or second values of a row of pairs.
TF_INLINE void load_bf16x3(const BFloat16* pairs, long apart, long which, Vec (&x)[2]) {
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
