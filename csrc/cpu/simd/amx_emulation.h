// AMX tile instructions in software, to run and test the AMX kernels on CPUs with AVX-512-BF16
// only. Included only in builds with TF_EMULATE_AMX: far too slow for anything but tests. For
// kernel files only.
//
// Stricter than the processor in order to find bugs: traps on any tile instruction before
// _tile_loadconfig or after _tile_release, on invalid tile numbers, and on any configuration other
// than eight tiles of 16 rows by 64 bytes, the only one the kernels use. Tiles hold NaN after a
// release. Loads and stores are ordinary memory accesses of 64 bytes per row, which
// AddressSanitizer checks.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "types.h"

// Defined by the compiler for processors with AMX.
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace tf::TF_ISA {
namespace {

class EmulatedTiles {
 public:
  static EmulatedTiles& of_thread() {
    static thread_local EmulatedTiles tiles;
    return tiles;
  }

  void configure(const void* from) {
    uint8_t bytes[64];
    std::memcpy(bytes, from, sizeof(bytes));
    uint16_t row_bytes[kTiles];
    std::memcpy(row_bytes, bytes + 16, sizeof(row_bytes));
    expect(bytes[0] == 1 && bytes[1] == 0);
    for (int tile = 0; tile < kTiles; ++tile)
      expect(row_bytes[tile] == kRowBytes && bytes[48 + tile] == kRows);
    std::memset(data_, 0, sizeof(data_));
    configured_ = true;
  }

  void release() {
    std::memset(data_, 0xff, sizeof(data_));
    configured_ = false;
  }

  void clear(int tile) { std::memset(at(tile), 0, kRows * kRowBytes); }

  void load(int tile, const void* from, Index stride) {
    uint8_t* to = at(tile);
    for (int row = 0; row < kRows; ++row)
      std::memcpy(to + row * kRowBytes, static_cast<const char*>(from) + row * stride, kRowBytes);
  }

  void store(int tile, void* to, Index stride) {
    const uint8_t* from = at(tile);
    for (int row = 0; row < kRows; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, from + row * kRowBytes, kRowBytes);
  }

  // C += A B for groups of four unsigned and signed 8-bit values, without saturation.
  void multiply_add_bytes(int c, int a, int b) {
    expect(c != a && c != b && a != b);
    uint8_t *sums = at(c), *left = at(a), *right = at(b);
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < kRowBytes / 4; ++column) {
        uint32_t sum;
        std::memcpy(&sum, sums + row * kRowBytes + 4 * column, sizeof(sum));
        for (int k = 0; k < kRowBytes; ++k) {
          const auto weight = static_cast<int8_t>(right[k / 4 * kRowBytes + 4 * column + k % 4]);
          sum += static_cast<uint32_t>(left[row * kRowBytes + k] * weight);
        }
        std::memcpy(sums + row * kRowBytes + 4 * column, &sum, sizeof(sum));
      }
  }

  // C += A B for pairs of bfloat16, with B's rows in pairs. As in SDM volume 2, TDPBF16PS: the
  // products of a row are summed first and C is added last, so that it is rounded once.
  void multiply_add(int c, int a, int b) {
    expect(c != a && c != b && a != b);
    uint8_t *sums = at(c), *left = at(a), *right = at(b);
    for (int row = 0; row < kRows; ++row) {
      __m512 sum = _mm512_setzero_ps();
      for (int pair = 0; pair < kRowBytes / 4; ++pair) {
        int32_t two;
        std::memcpy(&two, left + row * kRowBytes + 4 * pair, sizeof(two));
        sum = _mm512_dpbf16_ps(
            sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)),
            reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + pair * kRowBytes)));
      }
      sum = _mm512_add_ps(_mm512_loadu_ps(sums + row * kRowBytes), sum);
      _mm512_storeu_ps(sums + row * kRowBytes, sum);
    }
  }

 private:
  static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

  static void expect(bool holds) {
    if (!holds) __builtin_trap();
  }
  uint8_t* at(int tile) {
    expect(configured_ && tile >= 0 && tile < kTiles);
    return data_[tile];
  }

  alignas(64) uint8_t data_[kTiles][kRows * kRowBytes];
  bool configured_ = false;
};

}  // namespace
}  // namespace tf::TF_ISA

// Macros in some compilers' headers.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig(from) ::tf::TF_ISA::EmulatedTiles::of_thread().configure(from)
#define _tile_release() ::tf::TF_ISA::EmulatedTiles::of_thread().release()
#define _tile_zero(tile) ::tf::TF_ISA::EmulatedTiles::of_thread().clear(tile)
#define _tile_loadd(tile, from, stride) \
  ::tf::TF_ISA::EmulatedTiles::of_thread().load(tile, from, stride)
#define _tile_stored(tile, to, stride) \
  ::tf::TF_ISA::EmulatedTiles::of_thread().store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) ::tf::TF_ISA::EmulatedTiles::of_thread().multiply_add(c, a, b)
#define _tile_dpbusd(c, a, b) ::tf::TF_ISA::EmulatedTiles::of_thread().multiply_add_bytes(c, a, b)
