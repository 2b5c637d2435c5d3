// fp32 as a sum of three bfloat16 pieces, to multiply it on bfloat16 units: 8 + 8 + 8 bits of
// significand are fp32's 24. The first piece is cut off, so it cannot overflow; the second is
// rounded, so the third has either sign and products left out have no bias. Infinity is a first
// piece with nothing behind it. For kernel files built with AVX-512-BF16.
#pragma once

#include "cpu/bf16_pairs.h"

namespace tf::TF_ISA {
namespace {

constexpr int kSplitPieces = 3;

// The upper halves of each lane are the pieces of x.
TF_INLINE void split(Vec x, __m512i (&piece)[kSplitPieces]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  constexpr int kInfinite = 0x18;
  const Mask finite = static_cast<Mask>(~_mm512_fpclass_ps_mask(x, kInfinite));
  piece[0] = _mm512_castps_si512(x);
  const Vec rest =
      _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(_mm512_and_si512(piece[0], upper)));
  piece[1] = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
  piece[2] = _mm512_castps_si512(rest - _mm512_castsi512_ps(_mm512_and_si512(piece[1], upper)));
}

// The upper halves of the lanes of low and high, in order.
TF_INLINE __m512i upper_halves(__m512i low, __m512i high) {
  alignas(64) static constexpr uint16_t kOdd[32] = {
      1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(kOdd), high);
}

// kPanel values in order, pieces `apart`.
TF_INLINE void store_pieces(BFloat16* to, long apart, Vec low, Vec high) {
  __m512i l[kSplitPieces], h[kSplitPieces];
  split(low, l);
  split(high, h);
  TF_UNROLL for (int i = 0; i < kSplitPieces; ++i)
      _mm512_storeu_si512(to + i * apart, upper_halves(l[i], h[i]));
}

// pack_pair_rows() for each piece, block by block of kPairDepth.
TF_INLINE void split_pair_rows(const float* rows, long stride, long count, long k,
                               BFloat16* panel) {
  constexpr long kBlock = kPanel * kPairDepth;
  BFloat16 pieces[kSplitPieces * kBlock];
  for (long p = 0; p < k; p += kPairDepth, panel += kSplitPieces * kBlock) {
    const long left = k - p;
    for (long j = 0; j < count; ++j) {
      const float* row = rows + j * stride + p;
      store_pieces(pieces + j * kPairDepth, kBlock, load_some(row, least(kLanes, left)),
                   left > kLanes ? load_some(row + kLanes, left - kLanes) : zero());
    }
    for (int i = 0; i < kSplitPieces; ++i)
      pack_pair_rows(pieces + i * kBlock, kPairDepth, count, kPairDepth, panel + i * kBlock);
  }
}

// pack_pair_columns() for each piece, block by block of kPairDepth.
TF_INLINE void split_pair_columns(const float* rows, long stride, long columns, long k,
                                  BFloat16* panel) {
  constexpr long kBlock = kPanel * kPairDepth;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (long p = 0; p < pair_depth(k); p += 2) {
    BFloat16* to =
        panel + p / kPairDepth * kSplitPieces * kBlock + p % kPairDepth * kPanel;
    TF_UNROLL for (long j = 0; j < kPanel; j += kLanes) {
      const auto read = [&](long row) __attribute__((always_inline)) {
        return row < k && j < columns ? load_some(rows + row * stride + j, columns - j) : zero();
      };
      __m512i even[kSplitPieces], odd[kSplitPieces];
      split(read(p), even);
      split(read(p + 1), odd);
      TF_UNROLL for (int i = 0; i < kSplitPieces; ++i) _mm512_storeu_si512(
          to + i * kBlock + 2 * j,
          _mm512_or_si512(_mm512_srli_epi32(even[i], 16), _mm512_and_si512(odd[i], upper)));
    }
  }
}

// The kPanel even (which = 0) or odd values of a row of pairs.
TF_INLINE void load_pieces(const BFloat16* pairs, long apart, long which, Vec (&x)[2]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  TF_UNROLL for (int u = 0; u < 2; ++u) {
    x[u] = zero();
    TF_UNROLL for (int i = 0; i < kSplitPieces; ++i) {
      const __m512i both = _mm512_loadu_si512(pairs + i * apart + u * kPanel);
      x[u] = x[u] + _mm512_castsi512_ps(which == 0 ? _mm512_slli_epi32(both, 16)
                                                   : _mm512_and_si512(both, upper));
    }
  }
}

}  // namespace
}  // namespace tf::TF_ISA
