// Dot products of rows that are not packed, for few rows; for kernel files only.
#pragma once

#include "cpu/gemm/engine.h"

namespace tf::TF_ISA {
namespace {

// Products of unpacked operands: kDepth elements of a row at a time, summed in the lanes.
template <class T>
struct InPlace {
  using Operand = Vec;
  static constexpr Index kDepth = kLanes;
  TF_INLINE static Operand read(const T* from) { return load(from); }
  TF_INLINE static Operand read_n(const T* from, Index n) { return load_n(from, n); }
  TF_INLINE static Vec add_products(Vec sum, Operand a, Operand b) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
// vdpbf16ps takes pairs of adjacent k, as they are in memory.
template <>
struct InPlace<BFloat16> {
  using Operand = __m512bh;
  static constexpr Index kDepth = 2 * kLanes;
  TF_INLINE static Operand read(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  TF_INLINE static Operand read_n(const BFloat16* from, Index n) {
    return (__m512bh)load_values(from, n);
  }
  TF_INLINE static Vec add_products(Vec sum, Operand a, Operand b) {
    return _mm512_dpbf16_ps(sum, a, b);
  }
};
#endif

// to[j] = the sum of x[j]'s lanes.
template <int kCount>
TF_INLINE void store_sums(const Vec* x, float* to) {
#if defined(__AVX512F__)
  if constexpr (kCount % 4 == 0) {
    // Four at a time, transposed: half the instructions.
    TF_UNROLL for (int j = 0; j < kCount; j += 4) {
      const auto pair_sums = [](Vec a, Vec b) {
        return _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
      };
      const __m512d a = pair_sums(x[j], x[j + 1]), b = pair_sums(x[j + 2], x[j + 3]);
      const Vec four =
          _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      const __m256 two = _mm512_castps512_ps256(four) + _mm512_extractf32x8_ps(four, 1);
      _mm_storeu_ps(to + j, _mm256_castps256_ps128(two) + _mm256_extractf128_ps(two, 1));
    }
    return;
  }
#endif
  TF_UNROLL for (int j = 0; j < kCount; ++j) to[j] = reduce_add(x[j]);
}

}  // namespace
}  // namespace tf::TF_ISA
