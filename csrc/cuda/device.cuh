// Device code that all kernels share: element types, vectors of 16 bytes, reductions, Philox, and
// functions for instructions that CUDA C++ does not expose. Tests compile kernels with g++ and
// define the same functions in simt.h. So kernels may use only the parts of CUDA that both files
// define.
#pragma once

#include <cstdint>
#include <type_traits>

#ifdef TF_SIMT
#include "simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define TF_DEVICE __device__ __forceinline__
// Dynamic shared memory, aligned to 128 bytes for swizzled rows.
#define TF_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

namespace tf::cuda {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

#ifndef TF_SIMT
TF_DEVICE float to_float(float x) { return x; }
TF_DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
TF_DEVICE float to_float(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
TF_DEVICE void assign(float& to, float x) { to = x; }
TF_DEVICE void assign(bf16& to, float x) { to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
TF_DEVICE void assign(fp16& to, float x) { to.bits = __half_as_ushort(__float2half_rn(x)); }
TF_DEVICE uint32_t pack(bf16, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
TF_DEVICE uint32_t pack(fp16, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Returns x y, not contracted with an addition.
TF_DEVICE float rounded_product(float x, float y) { return __fmul_rn(x, y); }

// Returns 2^x with an error of 2^-22 relative to the result; results below 2^-126 are 0.
TF_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

TF_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Computes d += a b with a (16, 16) and b (16, 8), in the fragment layout of PTX's m16n8k16.
TF_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
TF_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], fp16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices of 16-bit elements; lanes 8 i ... 8 i + 7 have the row addresses of
// matrix i.
template <bool kTransposed>
TF_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const uint32_t at = shared_address(row);
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

// Copies 16 bytes to shared memory asynchronously, zeros unless `valid`; complete after the wait
// for its group.
TF_DEVICE void cp_async_16(void* to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
TF_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
TF_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#endif

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// kCount contiguous elements, read and written by one instruction if possible.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T value[kCount];
};

template <int kCount, class T>
TF_DEVICE void load(float (&to)[kCount], const T* from) {
  const Vector<T, kCount> found = *reinterpret_cast<const Vector<T, kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = to_float(found.value[i]);
}

template <int kCount, class T>
TF_DEVICE void store(T* to, const float (&from)[kCount]) {
  Vector<T, kCount> rounded;
#pragma unroll
  for (int i = 0; i < kCount; ++i) assign(rounded.value[i], from[i]);
  *reinterpret_cast<Vector<T, kCount>*>(to) = rounded;
}

// Like `store`, to global memory, for use in loops. There the compiler does not see the alignment,
// and `store` would write 16 bytes in four instructions.
template <int kCount, class T>
TF_DEVICE void store_global(T* to, const float (&from)[kCount]) {
#ifndef TF_SIMT
  if constexpr (sizeof(T) * kCount == 16) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2)
        word[i] = pack(T{}, from[2 * i], from[2 * i + 1]);
      else
        word[i] = __float_as_uint(from[i]);
    }
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
    return;
  }
#endif
  store(to, from);
}

// 16 bytes of a row, not converted. As an array of 16-bit elements each would get a register of its
// own from the compiler.
template <class T>
struct Chunk {
  static constexpr int kCount = 16 / sizeof(T);
  using Word = std::conditional_t<sizeof(T) == 2, uint32_t, float>;
  Vector<Word, 4> words;

  TF_DEVICE float operator[](int j) const {
    if constexpr (sizeof(T) == 2)
      return to_float(T{static_cast<uint16_t>(words.value[j / 2] >> 16 * (j % 2))});
    else
      return words.value[j];
  }
  TF_DEVICE void read(const T* from) { words = *reinterpret_cast<const Vector<Word, 4>*>(from); }
};

// Returns x rounded to T.
template <class T>
TF_DEVICE float rounded(float x) {
  T stored;
  assign(stored, x);
  return to_float(stored);
}

struct Add {
  TF_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
  TF_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Reduces over the lanes of a warp; all lanes get the same bits.
template <class Combine>
TF_DEVICE float reduce_warp(float x, Combine combine) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2)
    x = combine(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

// Reduces over kThreads threads, a warp or the whole block. `scratch`: kThreads / kWarp floats of
// shared memory, which may be reused when the call returns.
template <int kThreads, class Combine>
TF_DEVICE float reduce(float x, Combine combine, float* scratch) {
  x = reduce_warp(x, combine);
  if constexpr (kThreads > kWarp) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int w = 1; w < kThreads / kWarp; ++w) x = combine(x, scratch[w]);
    __syncthreads();
  }
  return x;
}

// Dropout. The pattern depends on the seed and the element's position only; it is documented in
// transformer_fast/reference/dropout.py. One Philox call returns the 16-bit random numbers of eight
// elements.
struct Dropout {
  bool on;              // false: no dropout, and the other members are not used
  const int64_t* seed;  // in device memory; may be null if all elements are dropped
  uint32_t limit;       // an element is kept if its random number is at least this
  float scale;          // factor of kept elements; 0: all elements are dropped
};

struct Words {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al. 2011): returns the words of elements 8 group ... 8 group + 7 of a
// row. The number of the first element is the low half of the first word, that of the second its
// high half, and so on.
TF_DEVICE Words philox(uint64_t seed, uint64_t row, uint32_t group) {
  uint32_t c0 = group, c1 = static_cast<uint32_t>(row), c2 = static_cast<uint32_t>(row >> 32);
  uint32_t c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
    const uint32_t low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

TF_DEVICE uint64_t seed_of(const Dropout& dropout) {
  return dropout.scale == 0.0f ? 0 : static_cast<uint64_t>(*dropout.seed);
}

// Returns the flags of elements 8 group ... 8 group + 7 of a row; bit i is set if element i is
// kept. For kernels whose threads draw flags for elements of other threads: eight flags fit a byte.
TF_DEVICE uint32_t keep_bits(const Dropout& dropout, uint64_t seed, uint64_t row, uint32_t group) {
  const Words words = philox(seed, row, group);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = words.word[i / 2];
    bits |= ((i % 2 != 0 ? word >> 16 : word & 0xffffu) >= dropout.limit ? 1u : 0u) << i;
  }
  return bits;
}

// Computes the dropout factors of kCount elements of a row from `column` on, which must be a
// multiple of kCount. One Philox call yields at most eight factors.
template <int kCount>
TF_DEVICE void dropout_factors(const Dropout& dropout, uint64_t row, uint64_t column,
                               float (&factors)[kCount]) {
  constexpr int kPart = kCount < 8 ? kCount : 8;
  static_assert(8 % kPart == 0 && kCount % kPart == 0, "columns of one call");
  const uint64_t seed = seed_of(dropout);
#pragma unroll
  for (int i = 0; i < kCount; i += kPart) {
    Words words = philox(seed, row, static_cast<uint32_t>((column + i) / 8));
    uint32_t (&word)[4] = words.word;
    const uint32_t at = static_cast<uint32_t>(column) % 8;  // 0 if kCount is at least 8
    if (kPart <= 4 && (at & 4) != 0) word[0] = word[2], word[1] = word[3];
    if (kPart <= 2 && (at & 2) != 0) word[0] = word[1];
    if (kPart <= 1 && (at & 1) != 0) word[0] >>= 16;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const uint32_t number = j % 2 != 0 ? word[j / 2] >> 16 : word[j / 2] & 0xffffu;
      factors[i + j] = number >= dropout.limit ? dropout.scale : 0.0f;
    }
  }
}

// Applies a dropout factor to x; dropped elements are 0 even if x is NaN or inf.
TF_DEVICE float drop(float x, float factor) { return factor == 0.0f ? 0.0f : x * factor; }

}  // namespace tf::cuda
