// The matrix product under every kernel: C (m x n) = A (m x k) B (k x n), for kernel files only.
//
// B comes packed in panels of kPanel columns: panel p holds B[:, p * kPanel ...] as (k, kPanel), the
// last one filled up with zeros. A is row-major. A register tile is up to kTileRows x kPanel: each
// step broadcasts one value of A per row and multiplies it with one row of the panel.
#pragma once

#include "cpu/transpose.h"

namespace tf::TF_ISA {
namespace {

constexpr int kPanel = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 14;  // 28 accumulators, 2 vectors of B and 1 of A: 31 of 32 registers
#else
constexpr int kTileRows = 6;  // 12 + 2 + 1 of 16
#endif

TF_INLINE long round_up(long x, long to) { return (x + to - 1) / to * to; }
TF_INLINE long least(long x, long y) { return x < y ? x : y; }
TF_INLINE long most(long x, long y) { return x > y ? x : y; }

// Steps of k in one go. A running sum of n terms errs like n; sums of kChain terms that are then
// added up err like sqrt(n * kChain), which keeps long products as exact as the best libraries'. And
// kChain rows of a panel stay in the first-level cache while all rows of A pass by.
constexpr long kChain = 128;

// What becomes of a tile's sums.
struct TileEnds {
  const float* bias;  // kPanel values to add, or nullptr
  bool accumulate;    // add to what C holds (then bias is not read)
  bool relu;          // clamp at the end
};

// Memory to fetch meanwhile: `step` bytes on at each step of k.
struct Ahead {
  const char* place;
  long step;
};

template <int kRows, int kVecs>
void tile(const float* a, long a_stride, const float* panel, long k, float* c, long c_stride,
          const TileEnds& ends, Ahead ahead) {
  Vec acc[kRows][kVecs];
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
    acc[i][j] = zero();
  // One pointer for three rows: x86 addresses base + stride and base + 2 stride by itself, and more
  // pointers than that do not fit into registers.
  const float* row[(kRows + 2) / 3];
  TF_UNROLL for (int i = 0; i < (kRows + 2) / 3; ++i) row[i] = a + 3 * i * a_stride;
  const auto step = [&](int u) __attribute__((always_inline)) {
    Vec b[kVecs];
    TF_UNROLL for (int j = 0; j < kVecs; ++j) b[j] = load(panel + u * kPanel + j * kLanes);
    TF_UNROLL for (int i = 0; i < kRows; ++i) {
      const Vec x = set1(row[i / 3][(i % 3) * a_stride + u]);
      TF_UNROLL for (int j = 0; j < kVecs; ++j) acc[i][j] = fma(x, b[j], acc[i][j]);
    }
  };
  const auto advance = [&](int steps) __attribute__((always_inline)) {
    TF_UNROLL for (int i = 0; i < (kRows + 2) / 3; ++i) row[i] += steps;
    panel += steps * kPanel;
  };
  long p = 0;
  for (; p + 4 <= k; p += 4) {
    _mm_prefetch(ahead.place, _MM_HINT_T0);
    step(0);
    step(1);
    _mm_prefetch(ahead.place + 2 * ahead.step, _MM_HINT_T0);
    step(2);
    step(3);
    ahead.place += 4 * ahead.step;
    advance(4);
  }
  for (; p < k; ++p) {
    step(0);
    advance(1);
  }
  if (ends.accumulate) {
    TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
      acc[i][j] = acc[i][j] + load(c + i * c_stride + j * kLanes);
  } else if (ends.bias != nullptr) {
    TF_UNROLL for (int j = 0; j < kVecs; ++j) {
      const Vec bias = load(ends.bias + j * kLanes);
      TF_UNROLL for (int i = 0; i < kRows; ++i) acc[i][j] = acc[i][j] + bias;
    }
  }
  if (ends.relu) {
    // In this order NaN comes through, as it does in torch.
    TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
      acc[i][j] = max(zero(), acc[i][j]);
  }
  TF_UNROLL for (int i = 0; i < kRows; ++i) TF_UNROLL for (int j = 0; j < kVecs; ++j)
    store(c + i * c_stride + j * kLanes, acc[i][j]);
}

using TileFunction = void (*)(const float*, long, const float*, long, float*, long,
                              const TileEnds&, Ahead);

#if defined(__AVX512F__)
constexpr TileFunction kTiles[2][kTileRows] = {
    {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>, tile<7, 1>,
     tile<8, 1>, tile<9, 1>, tile<10, 1>, tile<11, 1>, tile<12, 1>, tile<13, 1>, tile<14, 1>},
    {tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>, tile<7, 2>,
     tile<8, 2>, tile<9, 2>, tile<10, 2>, tile<11, 2>, tile<12, 2>, tile<13, 2>, tile<14, 2>}};
#else
constexpr TileFunction kTiles[2][kTileRows] = {
    {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>},
    {tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>}};
#endif

// Rows of one panel: c (m x columns) with columns <= kPanel. Writes whole vectors: up to
// round_up(columns, kLanes) columns of c. The rows are split evenly, so that no tile is flat. What
// of B is needed next (at last: `next`) is fetched meanwhile, a share by each tile.
TF_INLINE void panel_rows(const float* a, long a_stride, long m, const float* panel, long k,
                          float* c, long c_stride, long columns, const TileEnds& ends,
                          const float* next) {
  const TileFunction* tiles = kTiles[columns > kLanes ? 1 : 0];
  const long count = (m + kTileRows - 1) / kTileRows;
  const long step = kPanel * static_cast<long>(sizeof(float)) / count;
  long p = 0;
  do {
    const long depth = least(kChain, k - p);
    const bool last = p + depth == k;
    const TileEnds here{ends.bias, ends.accumulate || p > 0, ends.relu && last};
    const char* ahead = reinterpret_cast<const char*>(last ? next : panel + (p + depth) * kPanel);
    for (long i = 0, left = count; i < m; --left) {
      const long rows = (m - i + left - 1) / left;
      tiles[rows - 1](a + i * a_stride + p, a_stride, panel + p * kPanel, depth, c + i * c_stride,
                      c_stride, here, {ahead, step});
      ahead += depth * step;
      i += rows;
    }
    p += depth;
  } while (p < k);
}

// One panel from the rows of a matrix: panel[p][j] = rows[j][p] for j < count <= kPanel, p < k, and
// zeros for the other j.
TF_INLINE void pack_rows(const float* rows, long stride, long count, long k, float* panel) {
  for (int half = 0; half < 2; ++half) {
    const long have = most(0, least(kLanes, count - half * kLanes));
    const float* from = rows + half * kLanes * stride;
    float* to = panel + half * kLanes;
    long p = 0;
    if (have == kLanes) {
      for (; p + kLanes <= k; p += kLanes)
        transpose_block(from + p, stride, to + p * kPanel, kPanel);
    }
    for (; p < k; ++p)
      for (long j = 0; j < kLanes; ++j) to[p * kPanel + j] = j < have ? from[j * stride + p] : 0.0f;
  }
}

// Copies n floats, filling up to `room` with zeros.
TF_INLINE void copy_row(const float* from, long n, float* to, long room) {
  long j = 0;
  for (; j + kLanes <= n; j += kLanes) store(to + j, load(from + j));
  for (; j < n; ++j) to[j] = from[j];
  for (; j < room; ++j) to[j] = 0.0f;
}

}  // namespace
}  // namespace tf::TF_ISA
