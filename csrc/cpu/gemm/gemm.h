// fp32 GEMM micro-kernels: C (m x n) = A (m x k) B (k x n), for kernel files only.
//
// B is packed in panels of kPanel columns: panel p holds B[:, p * kPanel ...] as (k, kPanel), the
// last one padded with zeros. A is row-major. A register tile is up to kTileRows x kPanel: each
// step broadcasts one value of A per row and multiplies it by one row of the panel.
#pragma once

#include <utility>

#include "cpu/core/isa.h"
#include "cpu/simd/prefetch.h"
#include "cpu/simd/vec.h"
#include "types.h"

namespace tf::TF_ISA {
namespace {

constexpr int kPanel = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 28 accumulators, 2 vectors of B and 1 of A: 31 of 32 registers
#elif defined(__aarch64__)
constexpr int kTileRows = 12;  // 24 accumulators, 2 vectors of B and up to 6 of A: 32 registers
#else
constexpr int kTileRows = 6;  // 12 + 2 + 1 of 16
#endif

// Block size along k. The error of a running sum of n terms grows like n; sums of kKBlock terms
// that are then added up err like sqrt(n * kKBlock). With AVX-512, 256 are 2 % faster than 128,
// since a tile loads and stores its sums less often.
constexpr Index kKBlock = kLanes == 16 ? 256 : 128;

constexpr Index kLine = 64;  // bytes of a cache line

// Steps of k before the end of a tile at which C is prefetched: late enough that A and B do not
// evict its lines.
constexpr Index kPrefetchC = 64;

// Tiles of at most this many rows prefetch two lines per step.
constexpr int kTwoLineRows = kPanel * sizeof(float) > kLine ? 9 : 0;

// Memory to prefetch during the product: `step` bytes per step of k.
struct Prefetch {
  const char* place;
  Index step;
};

// Layout of A: row-major, a_stride apart; packed by pack_a() into micro-panels with kPackedRows
// values per k, so that one pointer with constant offsets reaches them all; or transposed, with
// a_stride between successive k.
enum class Form { rows, packed, columns };
constexpr int kPackedRows = (kTileRows + kLanes - 1) / kLanes * kLanes;

template <Form kForm, int kRows, int kVecs, bool kMultipleSums = (kRows < 3)>
void tile(const float* a, Index a_stride, const float* panel, Index k, float* c, Index c_stride,
          bool accumulate, Prefetch ahead) {
  // Few rows give few independent accumulators, limited by the latency of fma; so each row gets
  // several.
  constexpr int kAccumulators = !kMultipleSums ? 1 : kRows == 1 ? 4 : 2;
  Vec sums[kAccumulators][kRows][kVecs];
  TF_UNROLL for (int h = 0; h < kAccumulators; ++h) TF_UNROLL for (int i = 0; i < kRows; ++i)
      TF_UNROLL for (int j = 0; j < kVecs; ++j) sums[h][i][j] = zero();
  // One pointer per three rows: x86 addresses base + stride and base + 2 stride directly, and more
  // pointers do not fit into the registers.
  constexpr int kPointers = kForm == Form::rows ? (kRows + 2) / 3 : 1;
  const float* row[kPointers];
  TF_UNROLL for (int i = 0; i < kPointers; ++i) row[i] = a + 3 * i * a_stride;
  const auto step = [&](int u) __attribute__((always_inline)) {
    Vec b[kVecs];
    TF_UNROLL for (int j = 0; j < kVecs; ++j) b[j] = load(panel + u * kPanel + j * kLanes);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      const Vec x = set1(kForm == Form::rows     ? row[i / 3 % kPointers][(i % 3) * a_stride + u]
                         : kForm == Form::packed ? row[0][u * kPackedRows + i]
                                                 : row[0][i]);
      TF_UNROLL for (int j = 0; j < kVecs; ++j) sums[u % kAccumulators][i][j] =
          fma(x, b[j], sums[u % kAccumulators][i][j]);
    }
    if (kForm == Form::columns) {
      row[0] += a_stride;
      // Otherwise the compiler spills an offset per value instead of advancing this pointer.
      asm("" : "+r"(row[0]));
    }
  };
  const auto advance = [&](int steps) __attribute__((always_inline)) {
    TF_UNROLL for (int i = 0; i < kPointers; ++i) row[i] += kForm == Form::rows ? steps
                                                            : kForm == Form::packed
                                                                ? steps * kPackedRows
                                                                : 0;
    panel += steps * kPanel;
  };
  const Index prefetch_at = max(0, k / 4 * 4 - kPrefetchC);
  Index p = 0;
  for (; p + 4 <= k; p += 4) {
    if (p == prefetch_at) {
      TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
          prefetch_l1(c + i * c_stride + j * kLanes);
    }
    // Into the second-level cache: the first-level cache has few miss buffers, and loads need them.
    TF_UNROLL for (int u = 0; u < 4; ++u) {
      prefetch_l2(ahead.place + u * ahead.step);
      // A single tile has to prefetch all lines of the panel.
      if (kRows <= kTwoLineRows) prefetch_l2(ahead.place + u * ahead.step + kLine);
    }
    TF_UNROLL for (int u = 0; u < 4; ++u) step(u);
    ahead.place += 4 * ahead.step;
    advance(4);
  }
  for (; p < k; ++p) {
    step(0);
    advance(1);
  }
  Vec(&acc)[kRows][kVecs] = sums[0];
  TF_UNROLL for (int h = kAccumulators / 2; h > 0; h /= 2) TF_UNROLL for (int g = 0; g < h; ++g)
      TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
          sums[g][i][j] = sums[g][i][j] + sums[g + h][i][j];
  if (accumulate) {
    TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j) acc[i][j] =
        acc[i][j] + load(c + i * c_stride + j * kLanes);
  }
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
      store(c + i * c_stride + j * kLanes, acc[i][j]);
}

using TileFunction = void (*)(const float*, Index, const float*, Index, float*, Index, bool,
                              Prefetch);

// One function per tile height: of(rows) for 1 to kCount rows, with `rows` as a compile-time
// constant.
template <class Function, int kCount>
struct TileList {
  Function functions[kCount];
  constexpr Function operator[](Index i) const { return functions[i]; }
};
template <class F, int... kEach>
constexpr auto list_tiles(const F& of, std::integer_sequence<int, kEach...>) {
  using Function = decltype(of(std::integral_constant<int, 1>()));
  return TileList<Function, sizeof...(kEach)>{{of(std::integral_constant<int, kEach + 1>())...}};
}
template <int kCount = kTileRows, class F>
constexpr auto list_tiles(const F& of) {
  return list_tiles(of, std::make_integer_sequence<int, kCount>());
}

template <Form kForm, int kVecs>
constexpr auto kTilesOfVecs =
    list_tiles([](auto rows) -> TileFunction { return tile<kForm, decltype(rows)::value, kVecs>; });
// Tiles of one vector of columns, and of two.
template <Form kForm>
constexpr TileList<TileFunction, kTileRows> kTiles[2] = {kTilesOfVecs<kForm, 1>,
                                                         kTilesOfVecs<kForm, 2>};

// Tiles of one and two rows that sum in the same order as the larger ones.
template <Form kForm>
constexpr TileFunction kSingleSumTiles[2][2] = {
    {tile<kForm, 1, 1, false>, tile<kForm, 2, 1, false>},
    {tile<kForm, 1, 2, false>, tile<kForm, 2, 2, false>}};

// Divides rows evenly into tiles: f(tile, first row, rows).
template <class F>
TF_INLINE void each_tile(Index m, const F& f) {
  const Index count = (m + kTileRows - 1) / kTileRows;
  for (Index t = 0, i = 0; t < count; ++t) {
    const Index rows = (m - i + count - t - 1) / (count - t);
    f(t, i, rows);
    i += rows;
  }
}

// All rows by one panel: c (m x columns), columns <= kPanel. Writes whole vectors, up to
// round_up(columns, kLanes) columns of c. Prefetches the following part of B (finally `next`), a
// share in each tile. a_stride: between rows of A, or between its micro-panels if packed.
template <Form kForm>
TF_INLINE void panel_rows(const float* a, Index a_stride, Index m, const float* panel, Index k,
                          float* c, Index c_stride, Index columns, bool accumulate,
                          const float* next) {
  const int vecs = columns > kLanes ? 1 : 0;
  const TileFunction* tiles =
      m <= 2 && tf_batch_invariant() ? kSingleSumTiles<kForm>[vecs] : kTiles<kForm>[vecs].functions;
  constexpr Index kRowBytes = kPanel * static_cast<Index>(sizeof(float));
  if (m <= kTileRows && k <= kKBlock)
    return tiles[m - 1](a, a_stride, panel, k, c, c_stride, accumulate,
                        {reinterpret_cast<const char*>(next), kRowBytes});
  const Index count = (m + kTileRows - 1) / kTileRows;
  const Index step = kRowBytes / count;
  Index p = 0;
  do {
    const Index depth = min(kKBlock, k - p);
    const bool last = p + depth == k;
    const char* ahead = reinterpret_cast<const char*>(last ? next : panel + (p + depth) * kPanel);
    each_tile(m, [&](Index t, Index i, Index rows) {
      const float* from = kForm == Form::rows     ? a + i * a_stride + p
                          : kForm == Form::packed ? a + t * a_stride + p * kPackedRows
                                                  : a + p * a_stride + i;
      tiles[rows - 1](from, a_stride, panel + p * kPanel, depth, c + i * c_stride, c_stride,
                      accumulate || p > 0, {ahead, step});
      ahead += depth * step;
    });
    p += depth;
  } while (p < k);
}

// Transposed copy of a block: to[j * to_stride + i] = i < rows ? from[i * from_stride + j] : 0, for
// i, j < kLanes.
TF_INLINE void transpose_rows(const float* from, Index from_stride, Index rows, float* to,
                              Index to_stride) {
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
  Vec a = rows > 0 ? load(from) : zero(), b = rows > 1 ? load(from + from_stride) : zero();
  Vec c = rows > 2 ? load(from + 2 * from_stride) : zero();
  Vec d = rows > 3 ? load(from + 3 * from_stride) : zero();
#if defined(__aarch64__)
  const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
  a = vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
  b = vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
  c = vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
  d = vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
#else
  _MM_TRANSPOSE4_PS(a, b, c, d);
#endif
  store(to, a);
  store(to + to_stride, b);
  store(to + 2 * to_stride, c);
  store(to + 3 * to_stride, d);
#endif
}

// The same for a whole block; the constant eliminates the conditions.
TF_INLINE void transpose_block(const float* from, Index from_stride, float* to, Index to_stride) {
  transpose_rows(from, from_stride, kLanes, to, to_stride);
}

// Packs m rows of k values into micro-panels for Form::packed, `stride` floats apart, stride >=
// kPackedRows * k. Writes up to round_up(k, kLanes) values of k.
TF_INLINE void pack_a(const float* from, Index from_stride, Index m, Index k, float* to,
                      Index stride) {
  each_tile(m, [&](Index t, Index i, Index rows) {
    const float* first = from + i * from_stride;
    float* out = to + t * stride;
    for (Index r = 0; r < rows; r += kLanes) {
      const Index have = min(kLanes, rows - r);
      Index p = 0;
      for (; p + kLanes <= k; p += kLanes)
        transpose_rows(first + r * from_stride + p, from_stride, have, out + p * kPackedRows + r,
                       kPackedRows);
      for (; p < k; ++p)
        for (Index q = 0; q < have; ++q)
          out[p * kPackedRows + r + q] = first[(r + q) * from_stride + p];
    }
  });
}

// One panel from the rows of a matrix: panel[p][j] = rows[j][p] for j < count <= kPanel, p < k, and
// zeros for the other j.
TF_INLINE void pack_rows(const float* rows, Index stride, Index count, Index k, float* panel) {
  for (int half = 0; half < 2; ++half) {
    const Index have = max(0, min(kLanes, count - half * kLanes));
    const float* from = rows + half * kLanes * stride;
    float* to = panel + half * kLanes;
    Index p = 0;
    for (; p + kLanes <= k; p += kLanes) {
      if (have == kLanes) {
        transpose_block(from + p, stride, to + p * kPanel, kPanel);
      } else {
        transpose_rows(from + p, stride, have, to + p * kPanel, kPanel);
      }
    }
    for (; p < k; ++p)
      for (Index j = 0; j < kLanes; ++j)
        to[p * kPanel + j] = j < have ? from[j * stride + p] : 0.0f;
  }
}

// Offset of `column` (a multiple of kLanes) of a row in fp32 panels of m rows.
TF_INLINE Index weight_gradient_place(Index m, Index row, Index column) {
  return column / kPanel * kPanel * m + row * kPanel + column % kPanel;
}

// Other work between the tile products of AMX.

// Distributes `total` parts of work over `calls` calls between tile products, `at_once` parts per
// batch. Batches run in a function that is not inlined, whose constants then stay in registers: a
// few instructions between tile products are free, many are not.
class Interleaver {
 public:
  Interleaver(Index total, Index calls, Index at_once)
      : total_(total), between_(max(1, calls * at_once / max(1, total))), countdown_(between_) {
    const Index turns = max(1, calls / between_);
    parts_ = (total + turns - 1) / turns;
  }
  // Calls work(begin, end) for the parts that are due.
  template <class Work>
  TF_INLINE void operator()(const Work& work) {
    if (--countdown_ > 0 || done_ == total_) return;
    countdown_ = between_;
    run_until(work, min(done_ + parts_, total_));
  }
  // Runs the remaining parts.
  template <class Work>
  TF_INLINE void finish(const Work& work) {
    if (done_ < total_) run_until(work, total_);
  }

 private:
  template <class Work>
  TF_INLINE void run_until(const Work& work, Index until) {
    work(done_, until);
    done_ = until;
  }

  Index total_, between_, parts_, countdown_, done_ = 0;
};

// Prefetches a row of n values into the second-level cache.
template <class T>
void fetch_row(const T* row, Index n) {
  for (Index j = 0; j < n; j += kLine / static_cast<Index>(sizeof(T))) prefetch_l2(row + j);
}

// Prefetches the next data into the second-level cache, distributed over `calls` calls.
class FetchAhead {
 public:
  FetchAhead(const void* next, Index bytes, Index calls)
      : at_(static_cast<const char*>(next)), share_(bytes / kLine / max(1, calls) + 1) {}
  TF_INLINE void operator()() {
    for (Index line = 0; line < share_; ++line, at_ += kLine) prefetch_l2(at_);
  }

 private:
  const char* at_;
  Index share_;
};

}  // namespace
}  // namespace tf::TF_ISA
