// Random numbers of dropout: Philox4x32-10 (Salmon et al. 2011), 4 kLanes 16-bit numbers at a time;
// for kernel files only. Same pattern as transformer_fast/reference/dropout.py.
#pragma once

#include "cpu/simd/vec.h"
#include "types.h"

namespace tf::TF_ISA {
namespace {

// Vectors of 64-bit lanes with a word in the low half; the high half is arbitrary.
#if defined(__aarch64__)

using WideWords = uint64x2_t;
TF_INLINE WideWords words(uint64_t x) { return vdupq_n_u64(x); }
TF_INLINE WideWords multiply(WideWords a, WideWords b) {
  return vmull_u32(vmovn_u64(a), vmovn_u64(b));
}
TF_INLINE WideWords high_half(WideWords a) { return vshrq_n_u64(a, 32); }
TF_INLINE WideWords xor_of(WideWords a, WideWords b, WideWords c) {
  return veorq_u64(veorq_u64(a, b), c);
}
TF_INLINE WideWords join(WideWords a, WideWords b) { return vsliq_n_u64(a, b, 32); }
TF_INLINE WideWords even_pairs(WideWords a, WideWords b) { return vzip1q_u64(a, b); }
TF_INLINE WideWords odd_pairs(WideWords a, WideWords b) { return vzip2q_u64(a, b); }
TF_INLINE WideWords counters(uint64_t first) {
  return vaddq_u64(words(first), vcombine_u64(vcreate_u64(0), vcreate_u64(1)));
}
using KeepBits = uint32_t;
TF_INLINE KeepBits at_least(WideWords even, WideWords odd, uint32_t limit) {
  const uint16x8_t threshold = vdupq_n_u16(static_cast<uint16_t>(limit));
  const uint8x8_t each = vcreate_u8(0x8040201008040201);
  const uint8x8_t low = vmovn_u16(vcgeq_u16(vreinterpretq_u16_u64(even), threshold));
  const uint8x8_t high = vmovn_u16(vcgeq_u16(vreinterpretq_u16_u64(odd), threshold));
  return vaddv_u8(vand_u8(low, each)) | static_cast<KeepBits>(vaddv_u8(vand_u8(high, each))) << 8;
}
TF_INLINE Vec where_set(KeepBits bits, Vec value) {
  const uint32x4_t each = vmovl_u16(vcreate_u16(0x0008000400020001));
  const uint32x4_t set = vtstq_u32(vdupq_n_u32(bits), each);
  return vreinterpretq_f32_u32(vandq_u32(set, vreinterpretq_u32_f32(value)));
}

#elif defined(__AVX512F__)

using WideWords = __m512i;
TF_INLINE WideWords words(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
TF_INLINE WideWords multiply(WideWords a, WideWords b) { return _mm512_mul_epu32(a, b); }
TF_INLINE WideWords high_half(WideWords a) { return _mm512_srli_epi64(a, 32); }
TF_INLINE WideWords xor_of(WideWords a, WideWords b, WideWords c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
// Low halves of a in the low, of b in the high halves.
TF_INLINE WideWords join(WideWords a, WideWords b) {
  return _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
}
TF_INLINE WideWords even_pairs(WideWords a, WideWords b) { return _mm512_unpacklo_epi64(a, b); }
TF_INLINE WideWords odd_pairs(WideWords a, WideWords b) { return _mm512_unpackhi_epi64(a, b); }
// Counters first, first + 1, ..., permuted so that at_least() returns the bits of even_pairs() and
// odd_pairs() in element order.
TF_INLINE WideWords counters(uint64_t first) {
  return _mm512_add_epi64(words(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
}
using KeepBits = uint64_t;
// One bit per number, set where it is at least `limit`.
TF_INLINE KeepBits at_least(WideWords even, WideWords odd, uint32_t limit) {
  const __m512i threshold = _mm512_set1_epi16(static_cast<short>(limit));
  return _mm512_cmpge_epu16_mask(even, threshold) |
         static_cast<KeepBits>(_mm512_cmpge_epu16_mask(odd, threshold)) << 32;
}
// `value` in the lanes whose bit is set, else 0.
TF_INLINE Vec where_set(KeepBits bits, Vec value) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), value);
}

#elif defined(__AVX2__)

using WideWords = __m256i;
TF_INLINE WideWords words(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
TF_INLINE WideWords multiply(WideWords a, WideWords b) { return _mm256_mul_epu32(a, b); }
TF_INLINE WideWords high_half(WideWords a) { return _mm256_srli_epi64(a, 32); }
TF_INLINE WideWords xor_of(WideWords a, WideWords b, WideWords c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}
TF_INLINE WideWords join(WideWords a, WideWords b) {
  return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
}
TF_INLINE WideWords even_pairs(WideWords a, WideWords b) { return _mm256_unpacklo_epi64(a, b); }
TF_INLINE WideWords odd_pairs(WideWords a, WideWords b) { return _mm256_unpackhi_epi64(a, b); }
TF_INLINE WideWords counters(uint64_t first) {
  return _mm256_add_epi64(words(first), _mm256_setr_epi64x(0, 1, 2, 3));
}
using KeepBits = uint32_t;
TF_INLINE KeepBits at_least(WideWords even, WideWords odd, uint32_t limit) {
  const __m256i threshold = _mm256_set1_epi16(static_cast<short>(limit));
  even = _mm256_cmpeq_epi16(_mm256_max_epu16(even, threshold), even);
  odd = _mm256_cmpeq_epi16(_mm256_max_epu16(odd, threshold), odd);
  return static_cast<KeepBits>(_mm256_movemask_epi8(_mm256_packs_epi16(even, odd)));
}
TF_INLINE Vec where_set(KeepBits bits, Vec value) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each)), value);
}

#else

using WideWords = __m128i;
TF_INLINE WideWords words(uint64_t x) { return _mm_set1_epi64x(static_cast<long long>(x)); }
TF_INLINE WideWords multiply(WideWords a, WideWords b) { return _mm_mul_epu32(a, b); }
TF_INLINE WideWords high_half(WideWords a) { return _mm_srli_epi64(a, 32); }
TF_INLINE WideWords xor_of(WideWords a, WideWords b, WideWords c) {
  return _mm_xor_si128(_mm_xor_si128(a, b), c);
}
TF_INLINE WideWords join(WideWords a, WideWords b) {
  const WideWords low = _mm_set1_epi64x(0xffffffff);
  return _mm_or_si128(_mm_and_si128(a, low), _mm_slli_epi64(b, 32));
}
TF_INLINE WideWords even_pairs(WideWords a, WideWords b) { return _mm_unpacklo_epi64(a, b); }
TF_INLINE WideWords odd_pairs(WideWords a, WideWords b) { return _mm_unpackhi_epi64(a, b); }
TF_INLINE WideWords counters(uint64_t first) {
  return _mm_add_epi64(words(first), _mm_set_epi64x(1, 0));
}
using KeepBits = uint32_t;
TF_INLINE KeepBits at_least(WideWords even, WideWords odd, uint32_t limit) {
  // SSE2 has no unsigned comparison: limit - a with saturation is 0 where a >= limit.
  const __m128i threshold = _mm_set1_epi16(static_cast<short>(limit));
  even = _mm_cmpeq_epi16(_mm_subs_epu16(threshold, even), _mm_setzero_si128());
  odd = _mm_cmpeq_epi16(_mm_subs_epu16(threshold, odd), _mm_setzero_si128());
  return static_cast<KeepBits>(_mm_movemask_epi8(_mm_packs_epi16(even, odd)));
}
TF_INLINE Vec where_set(KeepBits bits, Vec value) {
  const __m128i each = _mm_setr_epi32(1, 2, 4, 8);
  const __m128i set = _mm_and_si128(_mm_set1_epi32(static_cast<int>(bits)), each);
  return _mm_and_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(set, each)), value);
}

#endif

constexpr Index kDraw = 4 * kLanes;  // elements per evaluation of Philox

// One bit for each of the kDraw elements from (row, column) on, set where it is kept. `column` is a
// multiple of 8.
inline KeepBits keep_bits(const Dropout& dropout, uint64_t row, uint64_t column) {
  const WideWords first = words(0xD2511F53u), second = words(0xCD9E8D57u);
  WideWords c0 = counters(column / 8), c1 = words(row), c2 = words(row >> 32), c3 = words(0);
  uint32_t key0 = static_cast<uint32_t>(dropout.seed);
  uint32_t key1 = static_cast<uint32_t>(dropout.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const WideWords a = multiply(c0, first), b = multiply(c2, second);
    c0 = xor_of(high_half(b), c1, words(key0));
    c2 = xor_of(high_half(a), c3, words(key1));
    c1 = b;
    c3 = a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const WideWords low = join(c0, c1), high = join(c2, c3);
  return at_least(even_pairs(low, high), odd_pairs(low, high), dropout.limit);
}

// factors[j] = dropout factor of element (row, column + j): 0 or dropout.scale. `column` is a
// multiple of 8; writes up to the next multiple of 2 kLanes.
inline void dropout_factors(const Dropout& dropout, uint64_t row, uint64_t column, Index count,
                            float* factors) {
  const Vec scale = set1(dropout.scale);
  for (Index j = 0; j < count; j += kDraw) {
    const KeepBits keep = keep_bits(dropout, row, column + static_cast<uint64_t>(j));
    store(factors + j, where_set(keep, scale));
    store(factors + j + kLanes, where_set(keep >> kLanes, scale));
    if (j + 2 * kLanes >= count) break;
    store(factors + j + 2 * kLanes, where_set(keep >> 2 * kLanes, scale));
    store(factors + j + 3 * kLanes, where_set(keep >> 3 * kLanes, scale));
  }
}

// The same for row `row` of a norm's input, which is n / columns rows of the tensor.
inline void row_dropout_factors(const Dropout& dropout, Index row, Index n, Index columns,
                                float* factors) {
  const Index rows = n / columns;
  // In increasing order, so that padding written behind a row is overwritten by the next.
  for (Index r = 0; r < rows; ++r)
    dropout_factors(dropout, static_cast<uint64_t>(row * rows + r), 0, columns,
                    factors + r * columns);
}

// Keep bits of kPanel columns of a row from `column` on, a multiple of kPanel. kDraw covers two
// panels: `keep` caches the bits of both and is recomputed if `draws`.
TF_INLINE KeepBits panel_bits(const Dropout& dropout, Index row, Index column, bool draws,
                              KeepBits& keep) {
  const Index inside = column % kDraw;
  if (draws)
    keep = keep_bits(dropout, static_cast<uint64_t>(row), static_cast<uint64_t>(column - inside));
  return keep >> inside;
}

// The corresponding dropout factors.
TF_INLINE void panel_factors(const Dropout& dropout, Index row, Index column, bool draws,
                             KeepBits& keep, Vec& low, Vec& high) {
  const KeepBits bits = panel_bits(dropout, row, column, draws, keep);
  low = where_set(bits, set1(dropout.scale));
  high = where_set(bits >> kLanes, set1(dropout.scale));
}

// Applies a dropout factor: exactly 0 where dropped, even if x is not finite.
TF_INLINE Vec drop(Vec x, Vec factor) { return select(equal(factor, zero()), zero(), x * factor); }

}  // namespace
}  // namespace tf::TF_ISA
