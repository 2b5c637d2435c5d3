// 8-bit GEMM with exact sums: C (m x kPanel) = A B. A is quantised from rows of floats while a
// block is filled. Each row has 254 steps from its least to its largest value, 0 included. For
// kernel files only.
//
// vpdpbusd, USDOT and AMX multiply unsigned by signed 8 bits. So A is stored with its zero point
// added, and zero * (column sum of B) is subtracted from the sums. SDOT multiplies signed values:
// A is stored less 128. Other sets multiply pairs of 16-bit values (pmaddwd), which hold A
// unchanged: vpmaddubsw would saturate its sums of two products.
#pragma once

#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/simd/convert.h"
#if defined(__AMX_BF16__)
#include "cpu/gemm/bf16_amx.h"
#elif defined(__AVX512BF16__)
#include "cpu/gemm/bf16_pairs.h"
#endif

namespace tf::TF_ISA {
namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define TF_DOT8
constexpr bool kHasDot8 = true;
#else
constexpr bool kHasDot8 = false;
#endif

// A vector of 32-bit sums.
#if defined(__aarch64__)
using Sums = int32x4_t;
TF_INLINE Sums load_sums(const void* p) {
  return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
TF_INLINE void store_sums(void* p, Sums x) {
  vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(x));
}
TF_INLINE Sums fill_sums(int32_t x) { return vdupq_n_s32(x); }
TF_INLINE Sums add_sums(Sums a, Sums b) { return vaddq_s32(a, b); }
TF_INLINE Sums max_sums(Sums a, Sums b) { return vmaxq_s32(a, b); }
TF_INLINE Sums bits_of(Vec x) { return vreinterpretq_s32_f32(x); }
TF_INLINE Vec to_floats(Sums x) { return vcvtq_f32_s32(x); }
TF_INLINE Sums round_to_integers(Vec x) { return vcvtnq_s32_f32(x); }
#elif defined(__AVX512F__)
using Sums = __m512i;
TF_INLINE Sums load_sums(const void* p) { return _mm512_loadu_si512(p); }
TF_INLINE void store_sums(void* p, Sums x) { _mm512_storeu_si512(p, x); }
TF_INLINE Sums fill_sums(int32_t x) { return _mm512_set1_epi32(x); }
TF_INLINE Sums add_sums(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
TF_INLINE Sums max_sums(Sums a, Sums b) { return _mm512_max_epi32(a, b); }
TF_INLINE int32_t reduce_max(Sums x) { return _mm512_reduce_max_epi32(x); }
TF_INLINE Sums bits_of(Vec x) { return _mm512_castps_si512(x); }
TF_INLINE Vec to_floats(Sums x) { return _mm512_cvtepi32_ps(x); }
TF_INLINE Sums round_to_integers(Vec x) { return _mm512_cvtps_epi32(x); }
#elif defined(__AVX2__)
using Sums = __m256i;
TF_INLINE Sums load_sums(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
TF_INLINE void store_sums(void* p, Sums x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
TF_INLINE Sums fill_sums(int32_t x) { return _mm256_set1_epi32(x); }
TF_INLINE Sums add_sums(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
TF_INLINE Sums max_sums(Sums a, Sums b) { return _mm256_max_epi32(a, b); }
TF_INLINE Sums bits_of(Vec x) { return _mm256_castps_si256(x); }
TF_INLINE Vec to_floats(Sums x) { return _mm256_cvtepi32_ps(x); }
TF_INLINE Sums round_to_integers(Vec x) { return _mm256_cvtps_epi32(x); }
#else
using Sums = __m128i;
TF_INLINE Sums load_sums(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
TF_INLINE void store_sums(void* p, Sums x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
TF_INLINE Sums fill_sums(int32_t x) { return _mm_set1_epi32(x); }
TF_INLINE Sums add_sums(Sums a, Sums b) { return _mm_add_epi32(a, b); }
TF_INLINE Sums max_sums(Sums a, Sums b) {
  const Sums larger = _mm_cmpgt_epi32(a, b);
  return _mm_or_si128(_mm_and_si128(larger, a), _mm_andnot_si128(larger, b));
}
TF_INLINE Sums bits_of(Vec x) { return _mm_castps_si128(x); }
TF_INLINE Vec to_floats(Sums x) { return _mm_cvtepi32_ps(x); }
TF_INLINE Sums round_to_integers(Vec x) { return _mm_cvtps_epi32(x); }
#endif

#if !defined(__AVX512F__)
TF_INLINE int32_t reduce_max(Sums x) {
  int32_t lanes[kLanes], found;
  store_sums(lanes, x);
  found = lanes[0];
  for (int32_t lane : lanes) found = found < lane ? lane : found;
  return found;
}
#endif
TF_INLINE float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Loads four bytes of a row of A for dot(), into all lanes.
TF_INLINE Sums load_bytes(const char* p) {
#if defined(__ARM_FEATURE_DOTPROD)
  // Fills the lowest lane only, which dot() selects: ld1r would take one of the slots of the
  // products.
  Sums x;
  asm("ldr %s0, %1" : "=w"(x) : "m"(*reinterpret_cast<const char (*)[4]>(p)));
  return x;
#else
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return fill_sums(bytes);
#endif
}

// sum += the products of a lane's four 8-bit, or two 16-bit, values. All lanes of a are equal.
TF_INLINE void dot(Sums& sum, Sums a, Sums b) {
  // In place: with the intrinsic, GCC 12 copies the sums and runs out of registers.
#if defined(__ARM_FEATURE_MATMUL_INT8)
  sum = vsudotq_laneq_s32(sum, vreinterpretq_s8_s32(b), vreinterpretq_u8_s32(a), 0);
#elif defined(__ARM_FEATURE_DOTPROD)
  sum = vdotq_laneq_s32(sum, vreinterpretq_s8_s32(b), vreinterpretq_s8_s32(a), 0);
#elif defined(__aarch64__)
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  sum = vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(x, y)));
#elif defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#elif defined(__AVX512F__)
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#elif defined(__AVX2__)
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#else
  sum = _mm_add_epi32(sum, _mm_madd_epi16(a, b));
#endif
}

#if defined(TF_DOT8)
// sum + the products of a lane's two 16-bit values.
TF_INLINE Sums add_pair_products(Sums sum, Sums a, Sums b) {
#if defined(__aarch64__)
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(x, y)));
#elif defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#endif
}

// Column sums of up to kMaxInt8Depth weights as two values of 16 bits each: 129 a + 128 b. vpmulld
// takes four times as long as the pair's products with -129 zero and -128 zero.
constexpr int32_t kPairFactors[] = {129, 128};
TF_INLINE int32_t as_pair(int32_t low, int32_t high) {
  return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 |
                              (static_cast<uint32_t>(low) & 0xffff));
}
TF_INLINE int32_t split_column_sum(int32_t sum) {
  const int32_t near = sum / (kPairFactors[0] + kPairFactors[1]);
  const int32_t a = near + ((sum - near) & 127);  // sum - 129 a is divisible by 128
  return as_pair(a, (sum - kPairFactors[0] * a) / kPairFactors[1]);
}
#endif

// Subtracted from A and its zero point where SDOT multiplies signed values.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t kSignedShift = 128;
#else
constexpr int32_t kSignedShift = 0;
#endif

// Stores 2 * kLanes integers as elements of A.
#if defined(TF_DOT8)
TF_INLINE void store_quantized(uint8_t* to, Sums low, Sums high) {
#if defined(__aarch64__)
  const uint16x8_t words = vcombine_u16(vqmovun_s32(low), vqmovun_s32(high));
  vst1_u8(to, vsub_u8(vqmovn_u16(words), vdup_n_u8(kSignedShift)));
#elif defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kLanes), _mm512_cvtepi32_epi8(high));
#else
  // Packs each half of the vectors by itself.
  const Sums words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#endif
}
#else
TF_INLINE void store_quantized(int16_t* to, Sums low, Sums high) {
#if defined(__aarch64__)
  vst1q_s16(to, vcombine_s16(vqmovn_s32(low), vqmovn_s32(high)));
#elif defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kLanes), _mm512_cvtepi32_epi16(high));
#elif defined(__AVX2__)
  store_sums(to, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
#else
  store_sums(to, _mm_packs_epi32(low, high));
#endif
}
#endif

// Where the results of a block and a panel are written: rows `stride` bytes apart.
struct Destination {
  const void* rows;
  Index stride;

  Destination from(Index row) const {
    return {static_cast<const char*>(rows) + row * stride, stride};
  }
};

// Steps before the end of a tile at which its destination is prefetched, see kPrefetchC.
constexpr Index kPrefetchSteps = 48;

// kRows rows of A times `steps` steps of a panel, into sums kPanel apart. Prefetches `to`, and
// `ahead_step` bytes a step.
template <int kRows>
void int8_tile(const char* a, Index a_stride, const char* panel, Index steps, int32_t* c,
               const char* ahead, Index ahead_step, Destination to) {
  // Few rows give few independent sums, limited by the latency of a step; so each row has several.
  constexpr int kSums = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;
  constexpr int kUnroll = kRows <= 3 ? 4 : 1, kRowBytes = 2 * sizeof(Sums);
  Sums sums[kSums][kRows][2];
  TF_UNROLL for (int h = 0; h < kSums; ++h) TF_UNROLL for (int i = 0; i < kRows; ++i)
      sums[h][i][0] = sums[h][i][1] = fill_sums(0);
  // One pointer for three rows, as in gemm.h.
  const char* row[(kRows + 2) / 3];
  TF_UNROLL for (int i = 0; i < (kRows + 2) / 3; ++i) row[i] = a + 3 * i * a_stride;
  const auto step = [&](int u) __attribute__((always_inline)) {
    const Sums low = load_sums(panel + u * kRowBytes);
    const Sums high = load_sums(panel + u * kRowBytes + kRowBytes / 2);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      const Sums x = load_bytes(row[i / 3] + (i % 3) * a_stride + 4 * u);
      dot(sums[u % kSums][i][0], x, low);
      dot(sums[u % kSums][i][1], x, high);
    }
  };
  const auto advance = [&](int count) __attribute__((always_inline)) {
    TF_UNROLL for (int i = 0; i < (kRows + 2) / 3; ++i) row[i] += 4 * count;
    panel += count * kRowBytes;
  };
  Index p = 0;
  const Index prefetch_at = max(0, steps / kUnroll * kUnroll - kPrefetchSteps);
  for (; p + kUnroll <= steps; p += kUnroll) {
    if (p == prefetch_at) {
      TF_UNROLL for (int i = 0; i < kRows; ++i) {
        prefetch_to_write(to.from(i).rows);
        prefetch_to_write(static_cast<const char*>(to.from(i).rows) + kLine);
      }
    }
    TF_UNROLL for (int u = 0; u < kUnroll; ++u) {
      prefetch_l2(ahead + u * ahead_step);
      if (kRowBytes > kLine) prefetch_l2(ahead + u * ahead_step + kLine);
    }
    TF_UNROLL for (int u = 0; u < kUnroll; ++u) step(u);
    ahead += kUnroll * ahead_step;
    advance(kUnroll);
  }
  for (; p < steps; ++p) {
    step(0);
    advance(1);
  }
  TF_UNROLL for (int h = kSums / 2; h > 0; h /= 2) TF_UNROLL for (int g = 0; g < h; ++g)
      TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < 2; ++j)
          sums[g][i][j] = add_sums(sums[g][i][j], sums[g + h][i][j]);
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < 2; ++j)
      store_sums(c + i * kPanel + j * kLanes, sums[0][i][j]);
}

// A row of T, multiplied by the factors of its columns while it is read. Used like a pointer to
// floats.
template <class T>
struct ScaledRow {
  const T* values;
  const float* factors;

  ScaledRow operator+(Index p) const { return {values + p, factors + p}; }
};
template <class T>
TF_INLINE Vec load(ScaledRow<T> row) {
  return load(row.values) * load(row.factors);
}
template <class T>
TF_INLINE Vec load_some(ScaledRow<T> row, Index n) {
  return load_some(row.values, n) * load_some(row.factors, n);
}

// Products of rows of T, quantised on the way, with weights in 8 bits. See engine.h for the
// interface; multiply() passes float(sum) to the sink, and row_scale() has a row's factor.
template <class T>
class Int8Product {
 public:
  using Destination = tf::TF_ISA::Destination;
  using Operand = char;  // bytes: also scales and zero points of a block, column sums of a panel
  static constexpr bool kIsBf16x3 = false, kQuantizes = true;
  static constexpr Index kBytes = kHasDot8 ? 1 : 2;  // of a value

  static void enter() {
#if defined(__AMX_BF16__)
    _tile_loadconfig(&kAmxTileConfig);
#endif
  }
  static void leave() {
#if defined(__AMX_BF16__)
    _tile_release();
#endif
  }

  // A panel: kStep rows of B side by side, then the sums of its columns, split.
  static Index panel_size(Index k) { return depth(k) * kBytes * kPanel + kPanel * 4; }
  // A block: scales and zero points of its rows, at most kMostRows, then the rows.
  static Index block_size(Index rows, Index k) {
    return kHeaders + round_up(rows, kRowUnit) * stride(k);
  }
  static float row_scale(const Operand* block, Index row) { return header(block, row).scale; }

  // factors (k): multiply the columns before these are quantised; nullptr: all are 1.
  static void fill(const T* from, Index from_stride, Index rows, Index k, Operand* block,
                   const float* factors = nullptr) {
    for (Index i = 0; i < rows; ++i, from += from_stride) {
      Operand *header = block + i * kHeader, *row = row_of(block, k, i);
      if (factors == nullptr)
        quantize_row(from, k, header, row);
      else
        quantize_row(ScaledRow<T>{from, factors}, k, header, row);
    }
  }

  // Packs `count` rows of int8 W = B^T. Four values of a row move as one float.
  static void pack_rows(const int8_t* rows, Index stride, Index count, Index k, Operand* panel) {
    constexpr Index kPart = 4 * kLanes;  // values of a row
    const Sums ones = fill_sums(kHasDot8 ? 0x01010101 : 0x00010001);
    Sums sums[2] = {fill_sums(0), fill_sums(0)};
    for (Index p = 0; p < depth(k); p += kPart) {
      float words[kLanes * kPanel];
      for (Index half = 0; half < kPanel; half += kLanes) {
        float part[kLanes * kLanes] = {};
        for (Index j = half; j < min(count, half + kLanes); ++j)
          copy(rows + j * stride + p, min(kPart, k - p), part + (j - half) * kLanes);
        transpose_block(part, kLanes, words + half, kPanel);
      }
      const Index values = min(kPart, depth(k) - p) * kPanel;
      Operand* to = panel + p * kPanel * kBytes;
      spread(reinterpret_cast<const int8_t*>(words), values, reinterpret_cast<Value*>(to));
      for (const Operand* end = to + values * kBytes; to < end; to += 2 * sizeof(Sums)) {
        dot(sums[0], ones, load_sums(to));
        dot(sums[1], ones, load_sums(to + sizeof(Sums)));
      }
    }
    panel += depth(k) * kBytes * kPanel;
#if defined(TF_DOT8)
    int32_t columns[kPanel];
    store_sums(columns, sums[0]);
    store_sums(columns + kLanes, sums[1]);
    for (int32_t& column : columns) column = split_column_sum(column);
    std::memcpy(panel, columns, sizeof(columns));
#endif
  }

  template <class Sink>
  static void multiply(const Operand* block, Index rows, Index k, const Operand* panel,
                       const Operand* next, float* buffer, const Sink& sink, Destination to) {
    product(block, rows, k, panel, next, reinterpret_cast<int32_t*>(buffer), to,
            [&](Index begin, Index end, const int32_t* sums) __attribute__((always_inline)) {
              finish_rows(sink, block, k, panel, begin, end, sums);
            });
  }
  static Index buffer_size(Index rows) { return round_up(rows, kRowUnit) * kPanel; }

  static bool needs_fp32(Vec, Vec) { return false; }

 private:
  using Value = std::conditional_t<kHasDot8, int8_t, int16_t>;
  using Quantized = std::conditional_t<kHasDot8, uint8_t, int16_t>;
  static constexpr Index kStep = 4 / kBytes;  // values of k per lane
  // Whole steps of the tiles of AMX, or of the vectors that quantize_row() stores.
  static constexpr Index kDepthUnit = kHasDot8 ? 64 : 2 * kLanes;
#if defined(__AMX_BF16__)
  static constexpr Index kRowUnit = 32;
#else
  static constexpr Index kRowUnit = 1;
#endif

  struct Header {
    float scale;
    int32_t zero;  // multiplies a split column sum
  };
  static constexpr Index kHeader = sizeof(Header), kHeaders = kMostRows * kHeader;
  static Index depth(Index k) { return round_up(k, kDepthUnit); }
  // Not a power of two between rows, which would map the rows of a tile to one cache set.
  static Index stride(Index k) { return depth(k) * kBytes + kLine; }
  static Header header(const Operand* block, Index row) {
    Header found;
    std::memcpy(&found, block + row * kHeader, sizeof(found));
    return found;
  }
  static const Operand* row_of(const Operand* block, Index k, Index row) {
    return block + kHeaders + row * stride(k);
  }
  static Operand* row_of(Operand* block, Index k, Index row) {
    return block + kHeaders + row * stride(k);
  }

  static void copy(const int8_t* from, Index count, float* to) {
    constexpr Index kAll = kLanes * sizeof(float);
    if (count >= kAll)
      std::memcpy(to, from, kAll);
    else if (count > 0)
      std::memcpy(to, from, static_cast<size_t>(count));
  }

  // Stores words of four values: as they are, or widened to 16 bits, kPanel pairs after another.
  static void spread(const int8_t* words, Index count, Value* to) {
    if constexpr (kHasDot8) {
      std::memcpy(to, words, static_cast<size_t>(count));
    } else {
      for (Index p = 0; p < count; p += 2 * kPanel, to += 2 * kPanel) {
        const int8_t* from = words + p / (4 * kPanel) * (4 * kPanel) + p % (4 * kPanel) / kPanel;
        for (Index j = 0; j < kPanel; ++j) {
          to[2 * j] = from[4 * j];
          to[2 * j + 1] = from[4 * j + 1];
        }
      }
    }
  }

  // Passes rows [begin, end) of sums to the sink.
  template <class Sink>
  static void finish_rows(const Sink& sink, const Operand* block, Index k, const Operand* panel,
                          Index begin, Index end, const int32_t* sums) {
    const Sink mine = sink;
    const Operand* columns = panel + depth(k) * kBytes * kPanel;
    const Sums low = load_sums(columns), high = load_sums(columns + sizeof(Sums));
    for (Index i = begin; i < end; ++i, sums += kPanel)
      mine(i, whole(block, i, sums, low), whole(block, i, sums + kLanes, high));
  }

  // The sums of a row and some columns, without its zero point.
  static Vec whole([[maybe_unused]] const Operand* block, [[maybe_unused]] Index row,
                   const int32_t* sums, [[maybe_unused]] Sums columns) {
#if defined(TF_DOT8)
    const Sums zero = fill_sums(header(block, row).zero);
    return to_floats(add_pair_products(load_sums(sums), zero, columns));
#else
    return to_floats(load_sums(sums));
#endif
  }

  // The scale follows from min(row, 0) and max(row, 0); with NaN or infinity it is NaN, and all
  // values are 0. Rows narrower than 2^-100 are 0, since the inverse could overflow. Half of the
  // width is finite if the row is.
  template <class Row>
  static void quantize_row(Row from, Index k, Operand* header, Operand* row) {
    const Range range = range_of(from, k);
    const float half = 0.5f * range.greatest + 0.5f * range.least;
    const bool wide = range.finite && half >= 0x1p-101f;
    const float inverse = wide ? kHalfSteps / half : 0.0f;
    const int32_t zero_point =
        kHasDot8 && wide ? first_lane(round_to_integers(set1(range.least * inverse))) : 0;
    Header found{!range.finite ? kNan : wide ? half / kHalfSteps : 0.0f, 0};
#if defined(TF_DOT8)
    const int32_t stored = zero_point - kSignedShift;
    found.zero = as_pair(-kPairFactors[0] * stored, -kPairFactors[1] * stored);
#endif
    std::memcpy(header, &found, sizeof(found));
    auto* values = reinterpret_cast<Quantized*>(row);
    if (wide)
      quantize_values(from, k, inverse, zero_point, values);
    else
      std::memset(values, 0, static_cast<size_t>(depth(k) * kBytes));
  }

  // Magnitude of the least value, if it is negative, and the greatest value, if it is positive.
  struct Range {
    float least, greatest;
    bool finite;
  };
  // The bits of positive floats order like the floats, and NaN comes after infinity.
  static Range range_from(int32_t least, int32_t greatest) {
    return {as_float(least), as_float(greatest),
            (least < greatest ? greatest : least) < 0x7f800000};
  }
  template <class Row>
  static Range range_of(Row from, Index k) {
    Sums high[2] = {fill_sums(0), fill_sums(0)}, low[2] = {fill_sums(0), fill_sums(0)};
    const Sums sign = fill_sums(INT32_MIN);
    const auto widen = [&](Vec x, int u) __attribute__((always_inline)) {
      high[u] = max_sums(high[u], bits_of(x));
      low[u] = max_sums(low[u], add_sums(bits_of(x), sign));  // of -x
    };
    Index p = 0;
    for (; p + 2 * kLanes <= k; p += 2 * kLanes)
      TF_UNROLL for (int u = 0; u < 2; ++u) widen(load(from + p + u * kLanes), u);
    for (; p < k; p += kLanes) widen(load_some(from + p, k - p), 0);
    return range_from(reduce_max(max_sums(low[0], low[1])), reduce_max(max_sums(high[0], high[1])));
  }
  template <class Row>
  static void quantize_values(Row from, Index k, float inverse, int32_t zero_point,
                              Quantized* values) {
    const Vec factor = set1(inverse);
    const Sums shift = fill_sums(zero_point);
    const auto quantized = [&](Vec x) __attribute__((always_inline)) {
      return add_sums(shift, round_to_integers(x * factor));
    };
    Index p = 0;
    for (; p + 2 * kLanes <= k; p += 2 * kLanes)
      store_quantized(values + p, quantized(load(from + p)), quantized(load(from + p + kLanes)));
    for (; p < depth(k); p += 2 * kLanes)
      store_quantized(
          values + p, quantized(k > p ? load_some(from + p, k - p) : zero()),
          quantized(k > p + kLanes ? load_some(from + p + kLanes, k - p - kLanes) : zero()));
  }

#if defined(__AVX512BF16__)
  // As integers of 16 bits, bfloat16 orders like its values where it is positive, and by magnitude
  // where it is negative, if these are unsigned. NaN comes after infinity.
  static Range range_of(const BFloat16* from, Index k) {
    __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
    for (Index p = 0; p < k; p += kPanel) {
      const __m512i x = load_values(from + p, k - p);
      high = _mm512_max_epi16(high, x);
      low = _mm512_max_epu16(low, x);
    }
    const uint32_t greatest =
        _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_slli_epi32(high, 16), upper_half(high)));
    const uint32_t least =
        _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_slli_epi32(low, 16), upper_half(low)));
    constexpr uint32_t kSign = 0x80000000;
    return range_from(static_cast<int32_t>(least < kSign ? 0 : least - kSign),
                      static_cast<int32_t>(greatest));
  }
  static void quantize_values(const BFloat16* from, Index k, float inverse, int32_t zero_point,
                              Quantized* values) {
    const Vec factor = set1(inverse);
    const __m512i shift = _mm512_set1_epi32(257 * zero_point);
    // Neighbours become the two bytes of 16 bits.
    for (Index p = 0; p < depth(k); p += kPanel) {
      const __m512i x = load_values(from + p, k - p);
      const __m512i even =
          round_to_integers(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)) * factor);
      const __m512i odd = round_to_integers(_mm512_castsi512_ps(upper_half(x)) * factor);
      const __m512i both =
          _mm512_add_epi32(_mm512_add_epi32(even, shift), _mm512_slli_epi32(odd, 8));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + p), _mm512_cvtepi32_epi16(both));
    }
  }
  static __m512i upper_half(__m512i x) {
    return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  }
#endif
  static constexpr float kHalfSteps = 127.0f, kNan = __builtin_nanf("");
  static int32_t first_lane(Sums x) {
    int32_t lanes[kLanes];
    store_sums(lanes, x);
    return lanes[0];
  }

  // finish(begin, end, sums) takes finished rows.
  template <class Finish>
  static void product(const Operand* block, Index rows, Index k, const Operand* panel,
                      const Operand* next, int32_t* sums, Destination to, const Finish& finish) {
#if defined(__AMX_BF16__)
    if (rows > kFewRows) return tile_product(block, rows, k, panel, next, sums, finish);
#endif
    // Whole steps only; the padding contributes nothing.
    const Index steps = (k + kStep - 1) / kStep, count = (rows + kTileRows - 1) / kTileRows;
    const Index share = 2 * static_cast<Index>(sizeof(Sums)) / count;
    // Few rows multiply panels as fast as they arrive, so these are prefetched a fixed distance
    // ahead, which was measured.
    if (rows <= 8) next = panel + (rows <= 4 ? 2048 : 4096);
    each_tile(rows, [&](Index, Index i, Index tile_rows) {
      kTiles[tile_rows - 1](row_of(block, k, i), stride(k), panel, steps, sums + i * kPanel, next,
                            share, to.from(i));
      finish(i, i + tile_rows, sums + i * kPanel);
      next += steps * share;
    });
  }
#if defined(__AMX_BF16__)
  static constexpr Index kTile = 16, kFewRows = 4;  // few rows leave most of a tile empty
  static constexpr int kVectorRows = kFewRows;
#else
  static constexpr int kVectorRows = kTileRows;
#endif
  static constexpr auto kTiles =
      list_tiles<kVectorRows>([](auto rows) { return &int8_tile<decltype(rows)::value>; });

#if defined(__AMX_BF16__)
  // Two tiles of rows by two of columns at a time, finished before the next: work between the
  // products of tiles saves no time, since the tiles lower the clock.
  template <class Finish>
  static void tile_product(const Operand* block, Index rows, Index k, const Operand* panel,
                           const Operand* next, int32_t* sums, const Finish& finish) {
    // Steps between loads and stores of sums: a part of a panel that stays in the first-level
    // cache while all rows are multiplied by it.
    constexpr Index kPart = 512 / kDepthUnit;
    const Index steps = depth(k) / kDepthUnit, parts = max(1, (steps + kPart - 1) / kPart);
    FetchAhead fetch(next, panel_size(k), (rows + kRowUnit - 1) / kRowUnit * steps);
    const auto sums_of = [&](Index row) { return sums + (parts > 1 ? row : 0) * kPanel; };
    compiler_barrier();
    for (Index part = 0; part < parts; ++part) {
      const Index begin_step = part * kPart, count = min(kPart, steps - begin_step);
      for (Index row = 0; row < rows; row += kRowUnit) {
        const auto meanwhile = [&]() __attribute__((always_inline)) { fetch(); };
        const char* a = row_of(block, k, row) + begin_step * kDepthUnit;
        const char* b = panel + begin_step * kDepthUnit * kPanel;
        if (rows - row > kTile)
          multiply_tiles<true>(a, stride(k), b, count, part > 0, sums_of(row), meanwhile);
        else
          multiply_tiles<false>(a, stride(k), b, count, part > 0, sums_of(row), meanwhile);
        if (part == parts - 1) finish(row, min(rows, row + kRowUnit), sums_of(row));
      }
    }
  }

  template <bool kTwo, class Meanwhile>
  TF_INLINE static void multiply_tiles(const Operand* a, Index a_stride, const Operand* panel,
                                       Index steps, bool accumulate, int32_t* sums,
                                       const Meanwhile& meanwhile) {
    using Tiles = AmxProduct<1>;  // moves the same bytes
    auto* c = reinterpret_cast<float*>(sums);
    if (accumulate)
      Tiles::load_sums<kTwo>(c, kPanel);
    else
      Tiles::clear_sums<kTwo>();
    for (Index p = 0; p < steps; ++p, a += kDepthUnit, panel += kDepthUnit * kPanel) {
      keep_avx512_active();
      tile_products<true, kTwo, true, true>(a, a + kTile * a_stride, a_stride, panel, meanwhile);
    }
    Tiles::store_sums<kTwo>(c, kPanel);
    compiler_barrier();
  }
#endif
};

}  // namespace
}  // namespace tf::TF_ISA
