// Compares instructions with their definitions (PTX ISA; IEEE 754; Salmon et al. 2011), on the SIMT
// machine if compiled by g++, and on a GPU if compiled by nvcc. If both pass, results of kernels on
// the machine are valid for a GPU. Prints "done" at the end.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/launch.cuh"

namespace {

using namespace tf::cuda;

int wrong = 0;
void expect(bool right, const char* what, int at, double found, double expected) {
  if (!right && ++wrong <= 20)
    std::printf("%s[%d] is %.17g and should be %.17g\n", what, at, found, expected);
}

// Device memory, with copies from and to the host.
template <class T>
struct Buffer {
  std::vector<T> host;
  T* device;

  explicit Buffer(size_t size) : host(size) { allocate(); }
  Buffer(const Buffer&) = delete;
#ifdef TF_SIMT
  void allocate() { device = host.data(); }
  T* send() { return device; }
  void fetch() {}
#else
  void allocate() { check(cudaMalloc(&device, host.size() * sizeof(T))); }
  ~Buffer() { cudaFree(device); }
  T* send() {
    check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
  }
  void fetch() {
    check(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
#endif
};

// The value of a 16-bit number: sign, exponent, `digits` bits of fraction.
double value_of(int bits, int digits) {
  const int width = 15 - digits, bias = (1 << (width - 1)) - 1;
  const int exponent = bits >> digits & ((1 << width) - 1), fraction = bits & ((1 << digits) - 1);
  double x = exponent == 2 * bias + 1 ? (fraction ? NAN : INFINITY)
             : exponent == 0 ? std::ldexp(fraction, 1 - bias - digits)
                             : std::ldexp(fraction + (1 << digits), exponent - bias - digits);
  return bits >> 15 ? -x : x;
}
template <class T>
constexpr int kDigits = std::is_same_v<T, bf16> ? 7 : 10;

// Rounds to the nearest of these numbers, ties to even.
int nearest(float x, int digits) {
  const int infinity = ((1 << (15 - digits)) - 1) << digits, sign = std::signbit(x) ? 0x8000 : 0;
  int low = 0, high = infinity;  // positive numbers are ordered by their bits
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (value_of(middle, digits) <= std::fabs(x) ? low : high) = middle;
  }
  // Infinity has the value that would follow the largest number.
  const double beyond =
      high < infinity ? value_of(high, digits) : 2 * value_of(infinity - (1 << digits), digits);
  const double below = std::fabs(x) - value_of(low, digits), above = beyond - std::fabs(x);
  if (std::isinf(x)) return sign | infinity;
  return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

uint32_t state = 1;
int draw(int end) {
  state = state * 1664525u + 1013904223u;
  return static_cast<int>((state >> 8) % static_cast<uint32_t>(end));
}

// ---- Tiles: a and b in shared memory and in fragments, and their product ------------------------

struct ProductArgs {
  const uint16_t *a, *b;        // (16, 16) and (16, 8)
  const uint32_t *a_in, *b_in;  // fragments: 4 and 2 registers per lane
  uint32_t *a_out, *b_out;      // fragments that ldmatrix loads from a and b
  float* sums;                  // 4 per lane, input and output
};

template <class T>
__global__ void product_kernel(const ProductArgs args) {
  TF_SHARED(shared);
  uint16_t* a = reinterpret_cast<uint16_t*>(shared);
  uint16_t* b = a + 16 * 16;
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 16; i += kWarp) a[i] = args.a[i];
  for (int i = lane; i < 16 * 8; i += kWarp) b[i] = args.b[i];
  __syncthreads();
  uint32_t left[4], right[4], given[4], other[2];
  ldmatrix_x4<false>(left, a + lane % 16 * 16 + lane / 16 * 8);
  ldmatrix_x4<true>(right, b + lane % 16 * 8);
  float sum[4];
  for (int i = 0; i < 4; ++i) {
    args.a_out[4 * lane + i] = left[i];
    args.b_out[4 * lane + i] = right[i];
    given[i] = args.a_in[4 * lane + i];
    sum[i] = args.sums[4 * lane + i];
  }
  for (int i = 0; i < 2; ++i) other[i] = args.b_in[2 * lane + i];
  mma(sum, given, other, T{});
  for (int i = 0; i < 4; ++i) args.sums[4 * lane + i] = sum[i];
}

// PTX ISA, "Matrix fragments for mma.m16n8k16": the row and column of the first of each pair.
struct Place {
  int row, column;
};
Place of_a(int lane, int i) { return {lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8}; }
Place of_b(int lane, int i) { return {lane % 4 * 2 + i * 8, lane / 4}; }
Place of_sum(int lane, int i) { return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2}; }

template <class T>
void products(const char* what, bool smallest) {
  Buffer<uint16_t> a(16 * 16), b(16 * 8);
  Buffer<uint32_t> a_in(4 * 32), b_in(2 * 32), a_out(4 * 32), b_out(4 * 32);
  Buffer<float> sums(4 * 32);
  // Integers whose sums are exact; or one product per row that needs all bits, of 1 + 2^-digits and
  // of the smallest number.
  for (int i = 0; i < 16 * 16; ++i) {
    const float x = smallest ? (i % 17 == 0 ? 1.0f + std::ldexp(1.0f, -kDigits<T>) : 0.0f)
                             : static_cast<float>(draw(33) - 16);
    a.host[i] = static_cast<uint16_t>(nearest(x, kDigits<T>));
  }
  for (int i = 0; i < 16 * 8; ++i) {
    b.host[i] = static_cast<uint16_t>(
        nearest(smallest ? 1.0f + std::ldexp(1.0f, -kDigits<T>) : static_cast<float>(draw(65) - 32),
                kDigits<T>));
    if (smallest && std::is_same_v<T, fp16> && i % 3 == 0) b.host[i] = 1;
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const auto [row, column] = of_a(lane, i);
      a_in.host[4 * lane + i] = a.host[16 * row + column] | a.host[16 * row + column + 1] << 16;
      sums.host[4 * lane + i] = smallest ? 0.0f : static_cast<float>(draw(100));
    }
    for (int i = 0; i < 2; ++i) {
      const auto [row, column] = of_b(lane, i);
      b_in.host[2 * lane + i] = b.host[8 * row + column] | b.host[8 * (row + 1) + column] << 16;
    }
  }
  const std::vector<float> before = sums.host;
  launch(product_kernel<T>, dim3(1), kWarp, (16 * 16 + 16 * 8) * 2, nullptr,
         ProductArgs{a.send(), b.send(), a_in.send(), b_in.send(), a_out.device, b_out.device,
                     sums.send()});
  a_out.fetch(), b_out.fetch(), sums.fetch();
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * lane + i;
      expect(a_out.host[at] == a_in.host[at], "ldmatrix", at, a_out.host[at], a_in.host[at]);
      // Matrices 2 and 3 repeat the rows of 0 and 1, whose addresses lanes 16 ... 31 repeat.
      expect(b_out.host[at] == b_in.host[2 * lane + i % 2], "ldmatrix, transposed", at,
             b_out.host[at], b_in.host[2 * lane + i % 2]);
      const auto [row, column] = of_sum(lane, i);
      double sum = before[at];
      for (int k = 0; k < 16; ++k)
        sum += value_of(a.host[16 * row + k], kDigits<T>) *
               value_of(b.host[8 * k + column], kDigits<T>);
      expect(sums.host[at] == sum, what, at, sums.host[at], sum);
    }
}

// ---- Asynchronous copies ------------------------------------------------------------------------

struct CopyArgs {
  const uint32_t* from;  // (3, 32, 4)
  uint32_t* to;
};

__global__ void copy_kernel(const CopyArgs args) {
  TF_SHARED(shared);
  uint32_t* tile = reinterpret_cast<uint32_t*>(shared);
  const int lane = threadIdx.x;
  for (int group = 0; group < 3; ++group) {
    const int at = (group * kWarp + lane) * 4;
    // Every third copy of the second group has size 0, so that its address may be invalid.
    const bool valid = group != 1 || lane % 3 != 0;
    cp_async_16(tile + at, args.from + at, valid);
    cp_async_commit();
  }
  cp_async_wait<1>();
  for (int i = 0; i < 2 * 4; ++i) {
    const int at = (i / 4 * kWarp + lane) * 4 + i % 4;
    args.to[at] = tile[at];
  }
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i)  // data of another lane
    args.to[(2 * kWarp + lane) * 4 + i] = tile[(2 * kWarp + kWarp - 1 - lane) * 4 + i];
}

void copies() {
  constexpr int kSize = 3 * 32 * 4;
  Buffer<uint32_t> from(kSize), to(kSize);
  for (int i = 0; i < kSize; ++i) from.host[i] = static_cast<uint32_t>(i + 1);
  launch(copy_kernel, dim3(1), kWarp, kSize * 4, nullptr, CopyArgs{from.send(), to.device});
  to.fetch();
  for (int at = 0; at < kSize; ++at) {
    const int group = at / 128, lane = at / 4 % 32;
    const int other = group == 2 ? 256 + (31 - lane) * 4 + at % 4 : at;
    const uint32_t expected = group == 1 && lane % 3 == 0 ? 0 : from.host[other];
    expect(to.host[at] == expected, "cp.async", at, to.host[at], expected);
  }
}

// ---- Lanes --------------------------------------------------------------------------------------

struct LaneArgs {
  float* to;  // (8, 32)
};

__global__ void lane_kernel(const LaneArgs args) {
  const int lane = threadIdx.x;
  const float mine = static_cast<float>(lane * lane);
  for (int i = 0; i < 5; ++i) args.to[i * 32 + lane] = __shfl_xor_sync(kAllLanes, mine, 1 << i);
  args.to[5 * 32 + lane] = __shfl_sync(kAllLanes, mine, lane / 8 * 8 + 3);
  args.to[6 * 32 + lane] = reduce_warp(mine, Add{});
  args.to[7 * 32 + lane] = static_cast<float>(__any_sync(kAllLanes, lane == 17) != 0) +
                           2 * static_cast<float>(__any_sync(kAllLanes, lane == 32) != 0);
}

void lanes() {
  Buffer<float> to(8 * 32);
  launch(lane_kernel, dim3(1), kWarp, 0, nullptr, LaneArgs{to.send()});
  to.fetch();
  for (int at = 0; at < 8 * 32; ++at) {
    const int lane = at % 32, row = at / 32;
    const int from = row < 5 ? lane ^ 1 << row : lane / 8 * 8 + 3;
    const int expected = row < 6 ? from * from : row == 6 ? 31 * 32 * 63 / 6 : 1;
    expect(to.host[at] == static_cast<float>(expected), "lanes", at, to.host[at], expected);
  }
}

// ---- Numbers ------------------------------------------------------------------------------------

struct NumberArgs {
  const float* from;  // (count), a multiple of 32
  uint32_t *pairs, *words;
  uint16_t* stored;
  float *powers, *values;  // values: (65536)
  int count;
};

template <class T>
__global__ void number_kernel(const NumberArgs args) {
  const int step = static_cast<int>(gridDim.x) * kWarp;
  const int first = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x);
  for (int i = first; i < args.count; i += step) {
    T stored;
    assign(stored, args.from[i]);
    args.stored[i] = stored.bits;
    args.pairs[i] = pack(T{}, args.from[i], args.from[i ^ 1]);
    args.powers[i] = exp2_approx(args.from[i]);
  }
  for (int i = first; i < 65536; i += step) args.values[i] = to_float(T{static_cast<uint16_t>(i)});
  if (first == 0)
    for (int i = 0; i < 4; ++i) {
      args.words[i] = philox(0, 0, 0).word[i];
    }
}

template <class T>
void numbers(const char* what) {
  std::vector<float> given;
  for (const float size :
       {0.0f,        0x1p-149f,       0x1p-133f,   0x1p-134f,       0x1.8p-133f,   0x1p-126f,
        0x1p-24f,    0x1p-25f,        0x1.8p-24f,  0x1.ffcp-15f,    0x1p-14f,      1.0f,
        0x1.01p0f,   0x1.03p0f,       0x1.002p0f,  0x1.006p0f,      0x1.010002p0f, 126.0f,
        126.5f,      127.0f,          65504.0f,    65519.99f,       65520.0f,      65536.0f,
        0x1.fep127f, 0x1.fefffep127f, 0x1.ffp127f, 0x1.fffffep127f, INFINITY,      NAN})
    given.push_back(size), given.push_back(-size);
  while (given.size() < 2048)
    given.push_back(std::ldexp(static_cast<float>(draw(1 << 24) - (1 << 23)), draw(60) - 40));
  const int count = static_cast<int>(given.size());
  Buffer<float> from(count), powers(count), values(65536);
  Buffer<uint32_t> pairs(count), words(4);
  Buffer<uint16_t> stored(count);
  from.host = given;
#ifdef TF_SIMT
  from.device = from.host.data();
#endif
  launch(number_kernel<T>, dim3(4), kWarp, 0, nullptr,
         NumberArgs{from.send(), pairs.device, words.device, stored.device, powers.device,
                    values.device, count});
  pairs.fetch(), words.fetch(), stored.fetch(), powers.fetch(), values.fetch();
  const auto same = [&](int bits, float x) {
    return std::isnan(x) ? std::isnan(value_of(bits, kDigits<T>)) : bits == nearest(x, kDigits<T>);
  };
  for (int i = 0; i < count; ++i) {
    const float x = given[i], other = given[i ^ 1];
    const double right = nearest(x, kDigits<T>);
    expect(same(stored.host[i], x), what, i, stored.host[i], right);
    expect(same(pairs.host[i] & 0xffff, x), "the low half of a pair", i, pairs.host[i], right);
    expect(same(pairs.host[i] >> 16, other), "the high half of a pair", i, pairs.host[i], right);
    const double power = std::exp2(static_cast<double>(x)), found = powers.host[i];
    const bool close = std::isnan(x)            ? std::isnan(found)
                       : power > 0x1.fffffep127 ? std::isinf(found) || found > 0x1.fffp127
                       : power < 0x1p-126       ? found >= 0.0 && found <= 0x1.0001p-126
                                                : std::fabs(found - power) <= 0x1p-22 * power;
    expect(close, "ex2", i, found, power);
    // Results far below the smallest normal number are flushed to 0.
    if (x < -126.5f) expect(found == 0.0, "ex2, flushed", i, found, 0.0);
  }
  for (int bits = 0; bits < 65536; ++bits) {
    const double expected = value_of(bits, kDigits<T>);
    const float found = values.host[bits];
    expect(std::isnan(expected) ? std::isnan(found)
                                : found == expected && std::signbit(found) == (bits >= 0x8000),
           "a value", bits, found, expected);
  }
  // Random123's known answer for a counter and a key of zeros.
  const uint32_t known[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  for (int i = 0; i < 4; ++i)
    expect(words.host[i] == known[i], "Philox", i, words.host[i], known[i]);
}

}  // namespace

int main() {
#ifndef TF_SIMT
  try {
#endif
    for (const bool smallest : {false, true}) {
      products<bf16>("mma, bf16", smallest);
      products<fp16>("mma, fp16", smallest);
    }
    copies();
    lanes();
    numbers<bf16>("to bf16");
    numbers<fp16>("to fp16");
#ifndef TF_SIMT
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
#endif
  if (wrong == 0) std::puts("done");
  return wrong != 0;
}
