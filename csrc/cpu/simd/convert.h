// Reduced floating-point types (bfloat16, float16) as vectors of fp32: converted on load, rounded
// to nearest even on store. For kernel files only.
#pragma once

#include "cpu/simd/vec.h"
#include "types.h"

namespace tf::TF_ISA {
namespace {

// kLanes 16-bit values as stored in memory, and their conversions.
#if defined(__aarch64__)

using Bits = uint16x4_t;
TF_INLINE Bits load_bits(const void* p) {
  Bits x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
TF_INLINE void store_bits(void* p, Bits x) { std::memcpy(p, &x, sizeof(x)); }
TF_INLINE Bits load_bits_n(const void* p, Index n) {
  uint16_t buffer[kLanes] = {};
  for (Index i = 0; i < n; ++i) buffer[i] = static_cast<const uint16_t*>(p)[i];
  return load_bits(buffer);
}
TF_INLINE void store_bits_n(void* p, Bits x, Index n) {
  uint16_t buffer[kLanes];
  store_bits(buffer, x);
  for (Index i = 0; i < n; ++i) static_cast<uint16_t*>(p)[i] = buffer[i];
}
TF_INLINE Vec from_bf16(Bits x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
TF_INLINE Bits to_bf16(Vec x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(is_nan(x), quiet, up), 16);
}
TF_INLINE Vec from_fp16(Bits x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
TF_INLINE Bits to_fp16(Vec x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

#elif defined(__AVX512F__)

using Bits = __m256i;
TF_INLINE Bits load_bits(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
TF_INLINE void store_bits(void* p, Bits x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
TF_INLINE Bits load_bits_n(const void* p, Index n) {
  return _mm256_maskz_loadu_epi16(first_lanes(n), p);
}
TF_INLINE void store_bits_n(void* p, Bits x, Index n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), x);
}
TF_INLINE Vec from_bf16(Bits x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
TF_INLINE Bits to_bf16(Vec x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // The addition could turn NaN into infinity.
  up = _mm512_mask_or_epi32(up, is_nan(x), bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}
TF_INLINE Vec from_fp16(Bits x) { return _mm512_cvtph_ps(x); }
TF_INLINE Bits to_fp16(Vec x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

#else

using Bits = __m128i;  // kLanes = 4: the lower half
TF_INLINE Bits load_bits(const void* p) {
  return kLanes == 8 ? _mm_loadu_si128(static_cast<const __m128i*>(p))
                     : _mm_loadl_epi64(static_cast<const __m128i*>(p));
}
TF_INLINE void store_bits(void* p, Bits x) {
  if (kLanes == 8) {
    _mm_storeu_si128(static_cast<__m128i*>(p), x);
  } else {
    _mm_storel_epi64(static_cast<__m128i*>(p), x);
  }
}
TF_INLINE Bits load_bits_n(const void* p, Index n) {
  uint16_t buffer[8] = {};
  for (Index i = 0; i < n; ++i) buffer[i] = static_cast<const uint16_t*>(p)[i];
  return load_bits(buffer);
}
TF_INLINE void store_bits_n(void* p, Bits x, Index n) {
  uint16_t buffer[8];
  store_bits(buffer, x);
  for (Index i = 0; i < n; ++i) static_cast<uint16_t*>(p)[i] = buffer[i];
}

#if defined(__AVX2__)

TF_INLINE Vec from_bf16(Bits x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
TF_INLINE Bits to_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const Vec rounded = select(is_nan(x), _mm256_castsi256_ps(quiet), _mm256_castsi256_ps(up));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(rounded), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
TF_INLINE Vec from_fp16(Bits x) { return _mm256_cvtph_ps(x); }
TF_INLINE Bits to_fp16(Vec x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

#else

TF_INLINE Vec from_bf16(Bits x) {
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), x));
}
TF_INLINE Bits to_bf16(Vec x) {
  const __m128i bits = _mm_castps_si128(x);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i up = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
  const __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
  const Vec rounded = select(is_nan(x), _mm_castsi128_ps(quiet), _mm_castsi128_ps(up));
  // An arithmetic shift, so that the signed packing does not saturate.
  const __m128i high = _mm_srai_epi32(_mm_castps_si128(rounded), 16);
  return _mm_packs_epi32(high, high);
}

// Scalar conversions without F16C. fp16 denormals are multiples of 2^-24; reinterpreted as fp32
// bits they would be fp32 denormals, which attention flushes to 0.
inline float widen(uint16_t half) {
  const uint32_t size = half & 0x7fffu, sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const float small = static_cast<float>(size) * 0x1p-24f;
  uint32_t bits;
  std::memcpy(&bits, &small, 4);
  if (size >= 0x400u) bits = (size << 13) + 0x38000000u;
  if (size >= 0x7c00u) bits = 0x7f800000u | size << 13;
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520 on
  if (size < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24, as for floats from 0.5 to 1.
    std::memcpy(&value, &size, 4);
    value += 0.5f;
    std::memcpy(&size, &value, 4);
    return static_cast<uint16_t>(sign | (size - 0x3f000000u));
  }
  size += 0xfffu + (size >> 13 & 1u);
  return static_cast<uint16_t>(sign | (size - 0x38000000u) >> 13);
}
TF_INLINE Vec from_fp16(Bits x) {
  uint16_t half[kLanes];
  float wide[kLanes];
  store_bits(half, x);
  for (int i = 0; i < kLanes; ++i) wide[i] = widen(half[i]);
  return load(wide);
}
TF_INLINE Bits to_fp16(Vec x) {
  uint16_t half[kLanes];
  float wide[kLanes];
  store(wide, x);
  for (int i = 0; i < kLanes; ++i) half[i] = narrow(wide[i]);
  return load_bits(half);
}

#endif
#endif

TF_INLINE Vec load(const BFloat16* p) { return from_bf16(load_bits(p)); }
TF_INLINE Vec load(const Float16* p) { return from_fp16(load_bits(p)); }
TF_INLINE Vec load_n(const BFloat16* p, Index n) { return from_bf16(load_bits_n(p, n)); }
TF_INLINE Vec load_n(const Float16* p, Index n) { return from_fp16(load_bits_n(p, n)); }
TF_INLINE void store(BFloat16* p, Vec x) { store_bits(p, to_bf16(x)); }
TF_INLINE void store(Float16* p, Vec x) { store_bits(p, to_fp16(x)); }
TF_INLINE void store_n(BFloat16* p, Vec x, Index n) { store_bits_n(p, to_bf16(x), n); }
TF_INLINE void store_n(Float16* p, Vec x, Index n) { store_bits_n(p, to_fp16(x), n); }

// Rounded to nearest in the given type.
TF_INLINE Vec rounded(Vec x, BFloat16) { return from_bf16(to_bf16(x)); }
TF_INLINE Vec rounded(Vec x, Float16) { return from_fp16(to_fp16(x)); }

// Up to kLanes elements of any type; the other lanes are 0.
template <class T>
TF_INLINE Vec load_some(const T* p, Index n) {
  return n >= kLanes ? load(p) : load_n(p, n);
}
template <class T>
TF_INLINE void store_some(T* p, Vec x, Index n) {
  n >= kLanes ? store(p, x) : store_n(p, x, n);
}

// f(T{}) for the type of elements: float, BFloat16 or Float16.
template <class F>
TF_INLINE auto dispatch_element(Element type, const F& f) {
  switch (type) {
    case Element::bfloat16:
      return f(BFloat16{});
    case Element::float16:
      return f(Float16{});
    default:
      return f(float{});
  }
}

// One element as a float.
template <class T>
TF_INLINE float load_one(const T* p) {
  float lanes[kLanes];
  store(lanes, load_n(p, 1));
  return lanes[0];
}
TF_INLINE float load_one(const float* p) { return *p; }
TF_INLINE float load_one(const BFloat16* p) {
  const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace
}  // namespace tf::TF_ISA
