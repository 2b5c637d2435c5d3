// A vector of 32-bit words with one interface for all instruction sets; for kernel files only.
#pragma once

#include "cpu/simd/vec.h"

namespace tf::TF_ISA {
namespace {

#if defined(__aarch64__)
using Words = uint32x4_t;
TF_INLINE Words load_words(const void* p) {
  return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
TF_INLINE Words fill(uint32_t x) { return vdupq_n_u32(x); }
TF_INLINE Words add(Words a, Words b) { return vaddq_u32(a, b); }
TF_INLINE Words add_products(Words sum, Words x) {
  const uint64x2_t wide = vreinterpretq_u64_u32(x);
  return vreinterpretq_u32_u64(
      vmlal_u32(vreinterpretq_u64_u32(sum), vmovn_u64(wide), vshrn_n_u64(wide, 32)));
}
#elif defined(__AVX512F__)
using Words = __m512i;
TF_INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
TF_INLINE Words fill(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
TF_INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
// sum + x[even] * x[odd], in lanes of 64 bits.
TF_INLINE Words add_products(Words sum, Words x) {
  return _mm512_add_epi64(sum, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
}
#elif defined(__AVX2__)
using Words = __m256i;
TF_INLINE Words load_words(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
TF_INLINE Words fill(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
TF_INLINE Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
TF_INLINE Words add_products(Words sum, Words x) {
  return _mm256_add_epi64(sum, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
}
#else
using Words = __m128i;
TF_INLINE Words load_words(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
TF_INLINE Words fill(uint32_t x) { return _mm_set1_epi32(static_cast<int>(x)); }
TF_INLINE Words add(Words a, Words b) { return _mm_add_epi32(a, b); }
TF_INLINE Words add_products(Words sum, Words x) {
  return _mm_add_epi64(sum, _mm_mul_epu32(x, _mm_srli_epi64(x, 32)));
}
#endif

// Whether all of n bytes, `step` apart, are zero.
inline bool all_zero(const char* place, Index step, Index n) {
  Index j = 0;
  if (step == 1) {
#if defined(__aarch64__)
    for (; j + 32 <= n; j += 32)
      if (any(vorrq_u32(load_words(place + j), load_words(place + j + 16)))) return false;
#else
    const __m128i zeros = _mm_setzero_si128();
    const auto load = [&](Index i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(place + i));
    };
    for (; j + 32 <= n; j += 32) {
      const __m128i either = _mm_or_si128(load(j), load(j + 16));
      if (_mm_movemask_epi8(_mm_cmpeq_epi8(either, zeros)) != 0xffff) return false;
    }
#endif
    uint64_t eight;
    for (; j + 8 <= n; j += 8) {
      std::memcpy(&eight, place + j, 8);
      if (eight != 0) return false;
    }
  }
  for (; j < n; ++j)
    if (place[j * step] != 0) return false;
  return true;
}

}  // namespace
}  // namespace tf::TF_ISA
