// Roofline loops. The arithmetic is inline assembly, which a compiler cannot fold, contract or
// eliminate. It has twelve accumulators, or sixteen on ARM: enough to cover a latency of 4 cycles
// on 2 ports (Neoverse V1 and later: 4 ports).
#include "cpu/probe/probe.h"
#include "cpu/simd/vec.h"
#if defined(__AMX_BF16__)
#include "cpu/gemm/bf16_amx.h"
#endif

namespace tf::TF_ISA {
namespace {

#if defined(__aarch64__)
#define TF_MULTIPLY_ADD(i) "fmla %" #i ".4s, %8.4s, %9.4s\n\t"
#elif defined(__FMA__)
#define TF_MULTIPLY_ADD(i) "vfmadd231ps %12, %13, %" #i "\n\t"
#else
#define TF_MULTIPLY_ADD(i) "mulps %12, %" #i "\n\taddps %13, %" #i "\n\t"
#endif

#define TF_EIGHT_TIMES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define TF_TWELVE_TIMES(X) TF_EIGHT_TIMES(X) X(8) X(9) X(10) X(11)
#define TF_SUM "+" TF_IN_VECTOR
#define TF_FOUR_SUMS(acc) TF_SUM((acc)[0]), TF_SUM((acc)[1]), TF_SUM((acc)[2]), TF_SUM((acc)[3])
#if defined(__aarch64__)
constexpr int kAccumulators = 16;  // in two statements, which have at most 30 operands
#define TF_ACCUMULATE_EIGHT(INSTRUCTION, acc, x, y)         \
  asm volatile(TF_EIGHT_TIMES(INSTRUCTION)                  \
               : TF_FOUR_SUMS(acc), TF_FOUR_SUMS((acc) + 4) \
               : TF_IN_VECTOR(x), TF_IN_VECTOR(y))
#define TF_ACCUMULATE(INSTRUCTION, acc, x, y)        \
  do {                                               \
    TF_ACCUMULATE_EIGHT(INSTRUCTION, acc, x, y);     \
    TF_ACCUMULATE_EIGHT(INSTRUCTION, acc + 8, x, y); \
  } while (false)
#else
constexpr int kAccumulators = 12;
#define TF_ACCUMULATE(INSTRUCTION, acc, x, y)                                        \
  asm volatile(TF_TWELVE_TIMES(INSTRUCTION)                                          \
               : TF_FOUR_SUMS(acc), TF_FOUR_SUMS((acc) + 4), TF_FOUR_SUMS((acc) + 8) \
               : TF_IN_VECTOR(x), TF_IN_VECTOR(y))
#endif

#if defined(__AMX_BF16__)

// Eight tiles of 16 rows by 64 bytes.
template <class Step>
void with_tiles(Index iterations, const Step& step) {
  _tile_loadconfig(&kAmxTileConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (Index i = 0; i < iterations; ++i) step();
  _tile_release();
}

// Four accumulators cover the latency of a tile.
#define TF_FOUR_TILES(INSTRUCTION) \
  INSTRUCTION(0, 4, 6);            \
  INSTRUCTION(1, 4, 7);            \
  INSTRUCTION(2, 5, 6);            \
  INSTRUCTION(3, 5, 7)

constexpr double kTileSums = 4 * 16 * 16;

#else

#define TF_BF16_DOT(i) "vdpbf16ps %12, %13, %" #i "\n\t"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define TF_INT8_DOT(i) "usdot %" #i ".4s, %8.16b, %9.16b\n\t"
#elif defined(__aarch64__)
#define TF_INT8_DOT(i) "sdot %" #i ".4s, %8.16b, %9.16b\n\t"
// AVX-VNNI requires the VEX encoding, which the assembler uses only on request.
#elif defined(__AVX512VNNI__)
#define TF_INT8_DOT(i) "vpdpbusd %12, %13, %" #i "\n\t"
#else
#define TF_INT8_DOT(i) "%{vex%} vpdpbusd %12, %13, %" #i "\n\t"
#endif
#define TF_DOT_LOOP(INSTRUCTION, iterations) \
  Vec acc[kAccumulators];                    \
  for (Vec& a : acc) a = zero();             \
  const Vec x = zero(), y = zero();          \
  for (Index i = 0; i < iterations; ++i) TF_ACCUMULATE(INSTRUCTION, acc, x, y)

#endif

}  // namespace

double fma_flops(Index iterations) {
  Vec acc[kAccumulators];
  for (Vec& a : acc) a = zero();
  // Bounded: sums of 2^-40, or the fixed point a = a / 2 + 1/2 of the SSE form.
  const Vec x = set1(kLanes > 4 ? 0x1p-20f : 0.5f), y = set1(kLanes > 4 ? 0x1p-20f : 0.5f);
  for (Index i = 0; i < iterations; ++i) TF_ACCUMULATE(TF_MULTIPLY_ADD, acc, x, y);
  return 2.0 * kLanes * kAccumulators * static_cast<double>(iterations);
}

#if defined(__AMX_BF16__)

double bf16_dot_flops(Index iterations) {
  with_tiles(iterations, [] { TF_FOUR_TILES(_tile_dpbf16ps); });
  return 2.0 * 32 * kTileSums * static_cast<double>(iterations);
}

double int8_dot_flops(Index iterations) {
  with_tiles(iterations, [] { TF_FOUR_TILES(_tile_dpbusd); });
  return 2.0 * 64 * kTileSums * static_cast<double>(iterations);
}

#else

double bf16_dot_flops([[maybe_unused]] Index iterations) {
#if defined(__AVX512BF16__)
  TF_DOT_LOOP(TF_BF16_DOT, iterations);
#endif
  return 4.0 * kLanes * kAccumulators * static_cast<double>(iterations);
}

double int8_dot_flops([[maybe_unused]] Index iterations) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
  TF_DOT_LOOP(TF_INT8_DOT, iterations);
#endif
  return 8.0 * kLanes * kAccumulators * static_cast<double>(iterations);
}

#endif

float sum_floats(const float* data, Index count) {
  constexpr int kStreams = 8;
  Vec sums[kStreams];
  for (Vec& s : sums) s = zero();
  Index i = 0;
  for (; i + kStreams * kLanes <= count; i += kStreams * kLanes) {
    for (int stream = 0; stream < kStreams; ++stream)
      sums[stream] += load(data + i + stream * kLanes);
  }
  float total = 0.0f;
  for (; i < count; ++i) total += data[i];
  for (const Vec& s : sums) {
    for (int lane = 0; lane < kLanes; ++lane) total += s[lane];
  }
  return total;
}

}  // namespace tf::TF_ISA
