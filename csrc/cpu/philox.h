// Dropout's random words: Philox4x32-10 (Salmon et al. 2011), kPanel words at a time; for kernel
// files only. The same words as transformer_fast/reference/dropout.py.
#pragma once

#include "cpu/dropout.h"
#include "cpu/vec.h"

namespace tf::TF_ISA {
namespace {

// Vectors of 64-bit lanes; a word sits in the low half of a lane, the high half is anything.
#if defined(__AVX512F__)

using Words = __m512i;
TF_INLINE Words words(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
TF_INLINE Words multiply(Words a, Words b) { return _mm512_mul_epu32(a, b); }
TF_INLINE Words high_half(Words a) { return _mm512_srli_epi64(a, 32); }
TF_INLINE Words xor_of(Words a, Words b, Words c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
// Low halves of a in the low, of b in the high halves.
TF_INLINE Words join(Words a, Words b) {
  return _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
}
TF_INLINE Words even_pairs(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
TF_INLINE Words odd_pairs(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
// Counters first, first + 1, ..., so that even_pairs() and odd_pairs() give words in their order.
TF_INLINE Words counters(uint64_t first) {
  return _mm512_add_epi64(words(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
}
// `value` where the word is at least `limit`, else 0.
TF_INLINE Vec at_least(Words a, uint32_t limit, Vec value) {
  return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(a, _mm512_set1_epi32(static_cast<int>(limit))),
                             value);
}

#elif defined(__AVX2__)

using Words = __m256i;
TF_INLINE Words words(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
TF_INLINE Words multiply(Words a, Words b) { return _mm256_mul_epu32(a, b); }
TF_INLINE Words high_half(Words a) { return _mm256_srli_epi64(a, 32); }
TF_INLINE Words xor_of(Words a, Words b, Words c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}
TF_INLINE Words join(Words a, Words b) {
  return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
}
TF_INLINE Words even_pairs(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }
TF_INLINE Words odd_pairs(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
TF_INLINE Words counters(uint64_t first) {
  return _mm256_add_epi64(words(first), _mm256_setr_epi64x(0, 2, 1, 3));
}
TF_INLINE Vec at_least(Words a, uint32_t limit, Vec value) {
  const __m256i least = _mm256_set1_epi32(static_cast<int>(limit));
  const __m256i keep = _mm256_cmpeq_epi32(_mm256_max_epu32(a, least), a);
  return _mm256_and_ps(_mm256_castsi256_ps(keep), value);
}

#else

using Words = __m128i;
TF_INLINE Words words(uint64_t x) { return _mm_set1_epi64x(static_cast<long long>(x)); }
TF_INLINE Words multiply(Words a, Words b) { return _mm_mul_epu32(a, b); }
TF_INLINE Words high_half(Words a) { return _mm_srli_epi64(a, 32); }
TF_INLINE Words xor_of(Words a, Words b, Words c) { return _mm_xor_si128(_mm_xor_si128(a, b), c); }
TF_INLINE Words join(Words a, Words b) {
  const Words low = _mm_set1_epi64x(0xffffffff);
  return _mm_or_si128(_mm_and_si128(a, low), _mm_slli_epi64(b, 32));
}
TF_INLINE Words even_pairs(Words a, Words b) { return _mm_unpacklo_epi64(a, b); }
TF_INLINE Words odd_pairs(Words a, Words b) { return _mm_unpackhi_epi64(a, b); }
TF_INLINE Words counters(uint64_t first) {
  return _mm_add_epi64(words(first), _mm_set_epi64x(1, 0));
}
TF_INLINE Vec at_least(Words a, uint32_t limit, Vec value) {
  // Signed comparison is the only one: shift both by 2^31.
  const __m128i half = _mm_set1_epi32(static_cast<int>(0x80000000u));
  const __m128i least = _mm_xor_si128(_mm_set1_epi32(static_cast<int>(limit)), half);
  const __m128i drop = _mm_cmplt_epi32(_mm_xor_si128(a, half), least);
  return _mm_andnot_ps(_mm_castsi128_ps(drop), value);
}

#endif

// factors[j] = what dropout multiplies element (row, column + j) of its tensor by: 0 or
// dropout.scale. `column` is a multiple of 4; writes up to the next multiple of 2 kLanes.
inline void dropout_factors(const Dropout& dropout, uint64_t row, uint64_t column, long count,
                            float* factors) {
  const Words first = words(0xD2511F53u), second = words(0xCD9E8D57u);
  const Vec scale = set1(dropout.scale);
  for (long j = 0; j < count; j += 2 * kLanes) {
    Words c0 = counters((column + static_cast<uint64_t>(j)) / 4), c1 = words(row);
    Words c2 = words(row >> 32), c3 = words(0);
    uint32_t key0 = static_cast<uint32_t>(dropout.seed);
    uint32_t key1 = static_cast<uint32_t>(dropout.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const Words a = multiply(c0, first), b = multiply(c2, second);
      c0 = xor_of(high_half(b), c1, words(key0));
      c2 = xor_of(high_half(a), c3, words(key1));
      c1 = b;
      c3 = a;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const Words low = join(c0, c1), high = join(c2, c3);
    store(factors + j, at_least(even_pairs(low, high), dropout.limit, scale));
    store(factors + j + kLanes, at_least(odd_pairs(low, high), dropout.limit, scale));
  }
}

// What dropout makes of x: 0 where dropped, whatever x is.
TF_INLINE Vec drop(Vec x, Vec factor) { return select(equal(factor, zero()), zero(), x * factor); }

}  // namespace
}  // namespace tf::TF_ISA
