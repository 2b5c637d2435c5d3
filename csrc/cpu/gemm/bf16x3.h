// bf16x3: fp32 as a sum of three bfloat16 components, to multiply fp32 on bfloat16 units: 8 + 8 + 8
// bits of significand are fp32's 24. The first component is truncated, so it cannot overflow; the
// second is rounded, so the third has either sign and the omitted products have no bias. Infinity
// is a first component followed by zeros. The order of a product's terms is free, so the pairs of a
// block of kPairDepth are the values j and 16 + j, whose components combine without a shuffle. AMX
// treats numbers below 2^-126 as 0, and with them the lower components of numbers up to 2^-110. For
// kernel files built with AVX-512-BF16.
#pragma once

#include "cpu/gemm/bf16_pairs.h"

namespace tf::TF_ISA {
namespace {

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

// Position of value j in a block of kPairDepth.
TF_INLINE long place_in_block(long j) { return j % 16 * 2 + j / 16; }

// Stores kPanel values, their components `apart` from each other.
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

// pack_pair_rows() for each component, in blocks of kPairDepth.
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

// Row `pair` of pairs of a panel of B, as bf16x3, from B's rows: k of them, `columns` values each.
// With kRepresentableOnly, 0 in place of numbers that are not representable.
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

// pack_pair_columns() for each component, in blocks of kPairDepth.
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
