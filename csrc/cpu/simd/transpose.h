// Transposed copies of kLanes x kLanes blocks; for kernel files only.
#pragma once

#include "cpu/simd/vec.h"

namespace tf::TF_ISA {
namespace {

// to[j * to_stride + i] = i < rows ? from[i * from_stride + j] : 0, for i, j < kLanes.
TF_INLINE void transpose_rows(const float* from, long from_stride, long rows, float* to,
                              long to_stride) {
#if defined(__AVX512F__)
  __m512 r[16], t[16];
  TF_UNROLL for (int i = 0; i < 16; ++i) r[i] = i < rows ? load(from + i * from_stride) : zero();
  TF_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  TF_UNROLL for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
    const __m512d c = _mm512_castps_pd(t[i + 1]), d = _mm512_castps_pd(t[i + 3]);
    r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  }
  TF_UNROLL for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  TF_UNROLL for (int i = 0; i < 4; ++i) {
    store(to + i * to_stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    store(to + (i + 8) * to_stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
    store(to + (i + 4) * to_stride, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
    store(to + (i + 12) * to_stride, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
  }
#elif defined(__AVX2__)
  __m256 r[8], t[8];
  TF_UNROLL for (int i = 0; i < 8; ++i) r[i] = i < rows ? load(from + i * from_stride) : zero();
  TF_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  TF_UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  TF_UNROLL for (int i = 0; i < 4; ++i) {
    store(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  Vec a = load(from), b = rows > 1 ? load(from + from_stride) : zero();
  Vec c = rows > 2 ? load(from + 2 * from_stride) : zero();
  Vec d = rows > 3 ? load(from + 3 * from_stride) : zero();
  _MM_TRANSPOSE4_PS(a, b, c, d);
  store(to, a);
  store(to + to_stride, b);
  store(to + 2 * to_stride, c);
  store(to + 3 * to_stride, d);
#endif
}

// The same for a whole block; the constant eliminates the conditions.
TF_INLINE void transpose_block(const float* from, long from_stride, float* to, long to_stride) {
  transpose_rows(from, from_stride, kLanes, to, to_stride);
}

}  // namespace
}  // namespace tf::TF_ISA
