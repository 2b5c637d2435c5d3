// A SIMT machine: runs the source of a CUDA kernel on the CPU, compiled by g++, for tests.
//
// Every CUDA thread is a fibre. Blocks run one after the other, in random order. The warps of a
// block run in an order that changes at every switch. A thread yields only where it has to wait: at
// a barrier, or where lanes of a warp exchange values. The machine is as strict as CUDA allows:
// shared memory starts as NaN, and asynchronous copies complete only when the program waits for
// them. Until then their destination is NaN. The process ends if not all threads reach a barrier,
// if a thread ends before its copies have completed, or if no GPU from sm_80 on supports the
// launch.
//
// With -fsanitize=thread each fibre is a thread of ThreadSanitizer. Only barriers order accesses to
// shared memory; an exchange among lanes does not, as in CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define __global__
#define __launch_bounds__(...)
#define TF_DEVICE inline
#define TF_SHARED(name) unsigned char* const name = simt::shared_memory()
#define threadIdx (simt::thread())
#define blockIdx (simt::block_index())
#define gridDim (simt::grid_size())

namespace simt {

dim3 thread();
dim3 block_index();
dim3 grid_size();
unsigned char* shared_memory();
void block_barrier();
void warp_barrier();
void copy_later(void* to, const void* from, bool valid);
void close_group();
void land(int pending);

// If true, the process ends if rows of an ldmatrix matrix share banks of shared memory.
inline bool no_bank_conflicts = false;

// A launch as another machine needs it: the kernel's address and its one parameter.
struct Called {
  const void* kernel;
  const void* parameter;
  size_t bytes;
};

// Runs kernel() for every thread of every block, or passes the launch to the callback of
// simt_take_launches.
void launch(const Called& called, dim3 grid, int threads, size_t shared,
            const std::function<void()>& kernel);

// Exchanges values among the lanes of a warp. `compute` maps the 32 values to 32 results; one lane
// runs it when all lanes have arrived.
constexpr int kValueBytes = 64;
using Compute = void (*)(const unsigned char (*in)[kValueBytes], unsigned char (*out)[kValueBytes],
                         const void* context);
void exchange(const void* in, size_t in_bytes, void* out, size_t out_bytes, Compute compute,
              const void* context);

template <class Out, class In, class F>
Out among_lanes(const In& mine, const F& f) {
  static_assert(sizeof(In) <= kValueBytes && sizeof(Out) <= kValueBytes);
  Out result;
  exchange(
      &mine, sizeof(In), &result, sizeof(Out),
      [](const unsigned char (*in)[kValueBytes], unsigned char (*out)[kValueBytes],
         const void* context) __attribute__((no_sanitize("thread"))) {
        In values[32];
        Out results[32];
        for (int lane = 0; lane < 32; ++lane) __builtin_memcpy(&values[lane], in[lane], sizeof(In));
        (*static_cast<const F*>(context))(values, results);
        for (int lane = 0; lane < 32; ++lane)
          __builtin_memcpy(out[lane], &results[lane], sizeof(Out));
      },
      &f);
  return result;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// binary16 by its definition: sign, 5 bits of exponent (bias 15), 10 of fraction.
inline float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float x = exponent == 31  ? (fraction ? NAN : INFINITY)
            : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                            : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits >> 15 ? -x : x;
}
// Rounds to the nearest binary16, ties to even.
inline uint16_t nearest_half(float x) {
  const uint16_t sign = to_bits(x) >> 16 & 0x8000;
  if (std::isnan(x)) return sign | 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  std::frexp(size, &exponent);
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // exponent of the last place
  const int places = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));
  if (places < 1024) return sign | static_cast<uint16_t>(places);
  // A fraction that is rounded up to 2048 carries into the exponent.
  return sign | static_cast<uint16_t>((unit + 24) * 1024 + places);
}

}  // namespace simt

inline void __syncthreads() { simt::block_barrier(); }
inline void __syncwarp() { simt::warp_barrier(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return simt::among_lanes<T>(value, [mask](const T* in, T* out) {
    for (int lane = 0; lane < 32; ++lane) out[lane] = in[lane ^ mask];
  });
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  struct Asked {
    T value;
    int from;
  };
  return simt::among_lanes<T>(Asked{value, from}, [](const Asked* in, T* out) {
    for (int lane = 0; lane < 32; ++lane) out[lane] = in[in[lane].from & 31].value;
  });
}
inline int __any_sync(unsigned, int predicate) {
  return simt::among_lanes<int>(predicate, [](const int* in, int* out) {
    int any = 0;
    for (int lane = 0; lane < 32; ++lane) any |= in[lane] != 0;
    for (int lane = 0; lane < 32; ++lane) out[lane] = any;
  });
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

namespace tf::cuda {

struct bf16;
struct fp16;

inline float to_float(float x) { return x; }
inline void assign(float& to, float x) { to = x; }
// Templates, because the types are still incomplete.
template <class T>
  requires std::is_same_v<T, bf16>
float to_float(T x) {
  return simt::from_bits(static_cast<uint32_t>(x.bits) << 16);
}
template <class T>
  requires std::is_same_v<T, fp16>
float to_float(T x) {
  return simt::half_value(x.bits);
}
template <class T>
  requires std::is_same_v<T, bf16>
void assign(T& to, float x) {
  const uint32_t bits = simt::to_bits(x);
  to.bits =
      std::isnan(x) ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class T>
  requires std::is_same_v<T, fp16>
void assign(T& to, float x) {
  to.bits = simt::nearest_half(x);
}
template <class T>
uint32_t pack(T, float low, float high) {
  T pair[2];
  assign(pair[0], low);
  assign(pair[1], high);
  return pair[0].bits | static_cast<uint32_t>(pair[1].bits) << 16;
}

inline float rounded_product(float x, float y) {
  const volatile float product = x * y;
  return product;
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

// PTX ISA, matrix fragments of mma.m16n8k16. In lane 4 g + t, a holds rows g and g + 8 at columns
// 2 t, 2 t + 1 and those plus 8; b holds the same indices as rows, at column g; d holds rows g and
// g + 8 at columns 2 t and 2 t + 1. Products are exact, sums are in fp32.
template <class T>
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T) {
  struct Fragments {
    uint32_t a[4], b[2];
    float d[4];
  } mine;
  struct Sums {
    float d[4];
  };
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  std::memcpy(mine.d, d, sizeof d);
  const Sums sums = simt::among_lanes<Sums>(mine, [](const Fragments* in, Sums* out) {
    const auto value = [](uint32_t pair, int which) {
      T element;
      element.bits = static_cast<uint16_t>(pair >> 16 * which);
      return to_float(element);
    };
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 2; ++e) {
        const int g = lane / 4, column = 2 * (lane % 4) + e;
        for (int r = 0; r < 4; ++r)
          left[g + r % 2 * 8][column + r / 2 * 8] = value(in[lane].a[r], e);
        for (int r = 0; r < 2; ++r) right[column + r * 8][g] = value(in[lane].b[r], e);
      }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
        float sum = in[lane].d[i];
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        out[lane].d[i] = sum;
      }
  });
  std::memcpy(d, sums.d, sizeof d);
}

// PTX ISA, ldmatrix: element pair t of row g of matrix i goes to lane 4 g + t, register i. Rows of
// a matrix that share banks of shared memory would be correct, but slow: they end the process.
template <bool kTransposed>
void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  struct Row {
    uint16_t element[8];
    uint32_t banks;  // index of the group of four banks, of eight
  } mine;
  struct Registers {
    uint32_t r[4];
  };
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    std::fprintf(stderr, "ldmatrix: a row that does not begin at a multiple of 16 bytes\n");
    std::abort();
  }
  std::memcpy(&mine, row, 16);  // read by the lane with the address, so that races are detected
  mine.banks = 1u << (reinterpret_cast<uintptr_t>(row) / 16 % 8);
  const Registers found = simt::among_lanes<Registers>(mine, [](const Row* in, Registers* out) {
    for (int matrix = 0; simt::no_bank_conflicts && matrix < 4; ++matrix) {
      uint32_t banks = 0;
      for (int g = 0; g < 8; ++g) banks |= in[8 * matrix + g].banks;
      if (banks == 0xff) continue;
      std::fprintf(stderr, "ldmatrix: rows of a matrix share banks\n");
      std::abort();
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int g = lane / 4, t = 2 * (lane % 4);
        const Row* rows = in + 8 * matrix;
        const uint32_t low = kTransposed ? rows[t].element[g] : rows[g].element[t];
        const uint32_t high = kTransposed ? rows[t + 1].element[g] : rows[g].element[t + 1];
        out[lane].r[matrix] = low | high << 16;
      }
  });
  std::memcpy(r, found.r, sizeof r);
}

inline void cp_async_16(void* to, const void* from, bool valid) {
  simt::copy_later(to, from, valid);
}
inline void cp_async_commit() { simt::close_group(); }
template <int kPending>
void cp_async_wait() {
  simt::land(kPending);
}

}  // namespace tf::cuda
