// Scores of a block of queries, panel by panel of keys: scaling, masking, conversion to exponents
// of 2, and 2^x with the accuracy that each element type needs. For kernel files only.
#pragma once

#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

constexpr float kLog2E = 1.44269504089f;

// Exponent of 2 of e^(score + shift); exactly 0 where score = -shift.
TF_INLINE Vec exponent(Vec score, Vec shift) { return (score + shift) * set1(kLog2E); }

// c[0] + c[1] f + ...
template <int kDegree>
TF_INLINE Vec polynomial(const float (&c)[kDegree + 1], Vec f) {
  Vec p = set1(c[kDegree]);
  TF_UNROLL for (int i = kDegree - 1; i >= 0; --i) p = fma(p, f, set1(c[i]));
  return p;
}

// 2^x; 0 for -inf, NaN for NaN. The relative error, 8e-5 for bfloat16 and 3e-6 for float16, is
// small compared to the rounding of the type. Minimax polynomials for 2^f.
#if defined(__AVX512F__)

// f in [0, 1): scalef itself takes the floor of x. Denormal results would cost a hundred times as
// much without flush_denormals().
template <int kDegree>
TF_INLINE Vec exp2(Vec x, const float (&c)[kDegree + 1]) {
  return _mm512_scalef_ps(polynomial<kDegree>(c, _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | 8)),
                          x);
}
TF_INLINE Vec exp2(Vec x, BFloat16) {
  constexpr float c[] = {9.9992521901e-01f, 6.9583353789e-01f, 2.2606715784e-01f,
                         7.8024523144e-02f};
  return exp2<3>(x, c);
}
// Relative error 1.5e-7, exact at 0; the rounding of x itself dominates where |x| is large.
TF_INLINE Vec exp2(Vec x, float) {
  constexpr float c[] = {1.0f,
                         6.9315131182e-01f,
                         2.4016445004e-01f,
                         5.5799913425e-02f,
                         9.0170299625e-03f,
                         1.8671302120e-03f};
  return exp2<5>(x, c);
}
TF_INLINE Vec exp2(Vec x, Float16) {
  constexpr float c[] = {1.0000025934e+00f, 6.9300383469e-01f, 2.4144275636e-01f, 5.2011460921e-02f,
                         1.3534167975e-02f};
  return exp2<4>(x, c);
}

#else

// f in [-1/2, 1/2]; from 2^128 on the result is not exact but large or infinite.
template <class T>
TF_INLINE Vec exp2(Vec x, T) {
  constexpr float c[] = {9.9999926144e-01f, 6.9312181469e-01f, 2.4024744830e-01f, 5.5917860698e-02f,
                         9.5701019611e-03f};
  const Vec n = round(max(set1(-126.0f), min(set1(128.0f), x))), f = x - n;
  const Vec power = scale_by_power(polynomial<4>(c, f), n);
  return select(less(x, set1(-126.0f)), zero(), power);
}

#endif

// e^x for the probabilities of fp32; the same contract as exp(). x must not exceed 88.3.
#if defined(__AVX512F__)

// The bits of 2^(i / 16), less i << 19: the low bits of k are in the place where k / 16 is added to
// the exponent.
alignas(64) constexpr uint32_t kPowers[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// With x = (k / 16) ln 2 + f: a table entry times a minimax polynomial for e^f. Two multiply-adds
// fewer than exp(), on units that the products need. Relative error 1.1e-7 + 2.7e-9 |x|: ln 2 is
// rounded to fp32, which is a tenth of the rounding error of x itself, a difference of two scores.
TF_INLINE Vec softmax_exp(Vec x) {
  const Mask normal = not_less(x, set1(kMinExponent));
  const Vec magic = set1(0x1.8p19f);  // leaves k in the lowest bits
  const Vec shifted = fma(x, set1(1.44269504089f), magic);
  const Vec f = fma(magic - shifted, set1(0.693147180560f), x);
  const __m512i k = _mm512_castps_si512(shifted);
  const __m512i entry = _mm512_permutexvar_epi32(k, _mm512_load_si512(kPowers));
  const Vec power = _mm512_castsi512_ps(_mm512_add_epi32(entry, _mm512_slli_epi32(k, 19)));
  const Vec p = fma(fma(f, set1(0.1666671783f), set1(0.5000161529f)), f, set1(1.0f));
  return _mm512_maskz_fmadd_ps(normal, power * f, p, power);
}

#else

TF_INLINE Vec softmax_exp(Vec x) { return exp(x); }

#endif

// Sets DAZ and FTZ for this thread: denormals are read and written as 0. Returns the previous state
// for restore_denormals().
TF_INLINE unsigned flush_denormals() {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
}
TF_INLINE void restore_denormals(unsigned before) { _mm_setcsr(before); }

constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// One block of queries of one head. `scores[slot]` are the products of a panel, kPanel per row.
class Scores {
 public:
  Scores(const AttentionShape& call, const BlockMask& mask, float* const* products)
      : shape(call), block_mask(mask), rows(mask.rows), scores(products) {}

 protected:
  struct Panel {
    long start, count;  // keys; count 0: no panel
    int slot;           // of its scores
    bool unmasked;      // visible to all rows, and the mask adds nothing
    bool direct;        // visible to all rows except for a mask that is read in place
    bool draws = true;  // dropout bits are not cached from the previous panel
  };

  // Number of the block's row i over (B, H, T).
  long row_of(long i) const {
    return (block_mask.b * shape.heads + block_mask.head) * shape.queries + block_mask.first + i;
  }

  // The first panel from `start` on that is visible to any row.
  Panel panel_from(long start, int slot) const {
    for (; start < block_mask.limit; start += kPanel) {
      const long count = min(kPanel, block_mask.limit - start);
      if (block_mask.fully_masked(start, count)) continue;
      const bool whole = count == kPanel && block_mask.visible(0, start, count) == count;
      const bool direct = whole && shape.mask != nullptr && shape.mask_stride[3] == 1;
      return {start, count, slot, whole && !mask_adds(start, count), direct, true};
    }
    return {start, 0, slot, false, false, true};
  }

  // Whether the mask changes any score of the panel; conservative unless it is broadcast over
  // queries.
  bool mask_adds(long start, long count) const {
    if (shape.mask == nullptr) return false;
    if (shape.mask_stride[2] != 0) return true;
    const float* mask = block_mask.mask_row(0, start, count);
    for (long j = 0; j < count; ++j)
      if (mask[j] != 0.0f) return true;
    return false;
  }

  // The mask of a row of a panel, or nullptr; `shared` if it is broadcast over queries.
  const float* mask_of(const Panel& panel, long i, const float* shared) const {
    if (shape.mask == nullptr || shared != nullptr) return shared;
    return block_mask.mask_row(i, panel.start, block_mask.visible(i, panel.start, panel.count));
  }

  // Sets scores of a row to -inf where masked by causality or length.
  TF_INLINE void mask_out_of_range(const Panel& panel, long i, Vec (&x)[2]) const {
    const long visible = block_mask.visible(i, panel.start, panel.count);
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      const long left = visible - u * kLanes;
      if (left < kLanes)
        x[u] = select(less(load(kLaneNumbers), set1(static_cast<float>(left))), x[u], set1(-kInf));
    }
  }

  // Scores times scale. Not `*`: the compiler would contract it with a following addition in some
  // places and not in others, and the largest score would differ from the row max.
  TF_INLINE Vec scaled(const float* s) const { return fma(load(s), set1(shape.scale), zero()); }

  // Scores times scale plus the mask.
  TF_INLINE Vec masked(const float* s, Vec mask) const {
    return select(equal(mask, set1(-kInf)), mask, fma(load(s), set1(shape.scale), mask));
  }

  // The kPanel scores of a row, scaled and masked (-inf).
  TF_INLINE void apply_mask(const Panel& panel, long i, const float* shared, Vec (&x)[2]) const {
    const float* s = scores[panel.slot] + i * kPanel;
    if (panel.direct) {
      const char* place = block_mask.mask_at(i, panel.start);
      const long bytes = element_bytes(shape.mask_type);
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        _mm_prefetch(place + (kPanel + u * kLanes) * bytes, _MM_HINT_T1);
        x[u] = masked(s + u * kLanes, block_mask.mask_vector(place, u * kLanes));
      }
      return;
    }
    const float* mask = mask_of(panel, i, shared);
    const long visible = block_mask.visible(i, panel.start, panel.count);
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      if (mask != nullptr) {
        const long left = visible - u * kLanes;
        x[u] = masked(s + u * kLanes, left > 0 ? load_some(mask + u * kLanes, left) : set1(-kInf));
      } else {
        x[u] = scaled(s + u * kLanes);
      }
    }
    mask_out_of_range(panel, i, x);
  }

  // The mask of a panel if it is broadcast over queries and not read in place.
  const float* shared_mask(const Panel& panel) const {
    return shape.mask != nullptr && shape.mask_stride[2] == 0 && !panel.direct
               ? block_mask.mask_row(0, panel.start, panel.count)
               : nullptr;
  }

  const AttentionShape& shape;
  const BlockMask block_mask;
  const long rows;
  float* const* const scores;
};

}  // namespace
}  // namespace tf::TF_ISA
