// Norms. The row is in cache after the first pass, so memory is read once; the variance is computed
// around the mean, never as E[x^2] - E[x]^2.
#include "cpu/ops/norm/layer_norm.h"
#include "cpu/simd/column_sums.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {

// The AVX-512 build of fp32 serves the instruction sets above it.
#if !defined(__AVX512BF16__)
namespace {

void one_row(const LayerNormArgs& args, long row, float* factors) {
  const long n = args.n;
  const float* x = static_cast<const float*>(args.x) + row * args.x_stride;
  float* y = static_cast<float*>(args.y) + row * n;
  const float* weight = static_cast<const float*>(args.weight);
  const float* bias = static_cast<const float*>(args.bias);
  const float* source = x;
  float total[1] = {0.0f};
  if (args.residual != nullptr) {
    const float* residual = static_cast<const float*>(args.residual) + row * args.residual_stride;
    float* sum = static_cast<float*>(args.sum) + row * n;
    if (args.dropout.on)
      row_dropout_factors(args.dropout, row, args.n, args.dropout_columns, factors);
    row_sums(n, total, [&](Vec* to, long j, long count) __attribute__((always_inline)) {
      Vec s = load_some(x + j, count);
      if (args.dropout.on) s = drop(s, load_some(factors + j, count));
      s = s + load_some(residual + j, count);
      store_some(sum + j, s, count);
      to[0] = to[0] + s;
    });
    source = sum;
  } else if (subtracts_mean(args.kind)) {
    row_sums(n, total, [&](Vec* to, long j, long count) __attribute__((always_inline)) {
      to[0] = to[0] + load_some(x + j, count);
    });
  }
  float mean, rstd;
  row_statistics(args, total[0], [&](float c) { return sum_of_squares(source, n, c); }, mean, rstd);

  const Vec centre = set1(mean), scale = set1(rstd);
  each_vector(n, [&](long i, long count) {
    Vec value = (load_some(source + i, count) - centre) * scale;
    if (weight != nullptr) value = value * load_some(weight + i, count);
    if (bias != nullptr) value = value + load_some(bias + i, count);
    store_some(y + i, value, count);
  });
  if (args.mean != nullptr) args.mean[row] = mean;
  if (args.rstd != nullptr) args.rstd[row] = rstd;
}

}  // namespace

long layer_norm_scratch(const LayerNormArgs& args) {
  return args.dropout.on ? (args.n + 2 * kLanes) * static_cast<long>(sizeof(float)) : 0;
}

void layer_norm_rows(const LayerNormArgs& args, long begin, long end, void* scratch) {
  for (long row = begin; row < end; ++row) one_row(args, row, static_cast<float*>(scratch));
}
#endif

// bfloat16 and float16: each row is converted to fp32 in scratch once and stays in the first-level
// cache for the following passes.
namespace {

TF_INLINE long room(long n) { return round_up(n, kLanes); }

TF_INLINE Vec rounded(Vec x, const BFloat16*) { return from_bf16(to_bf16(x)); }
TF_INLINE Vec rounded(Vec x, const Float16*) { return from_fp16(to_fp16(x)); }

struct Workspace {
  float *row, *weight, *bias, *factors;
  Workspace(void* scratch, long n) {
    row = static_cast<float*>(scratch);
    weight = row + room(n);
    bias = weight + room(n);
    factors = bias + room(n);
  }
};

// Converts a row of any type, or the value `absent`, to floats padded with zeros.
void widen(const void* from, Element type, long n, float absent, float* to) {
  for (long j = 0; j < room(n); j += kLanes) {
    const long count = n - j;
    Vec x = zero();
    if (count <= 0) {
    } else if (from == nullptr) {
      x = set1(absent);
    } else if (type == Element::float32) {
      x = load_some(static_cast<const float*>(from) + j, count);
    } else if (type == Element::bfloat16) {
      x = load_some(static_cast<const BFloat16*>(from) + j, count);
    } else {
      x = load_some(static_cast<const Float16*>(from) + j, count);
    }
    store(to + j, x);
  }
}

// Loads x, or the residual sum, into scratch; returns its total.
template <class T>
TF_INLINE float begin_row(const LayerNormArgs& args, long row, const Workspace& work) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const bool add = args.residual != nullptr;
  const T* residual = static_cast<const T*>(args.residual) + (add ? row * args.residual_stride : 0);
  T* sum = static_cast<T*>(args.sum) + (add ? row * args.n : 0);
  if (add && args.dropout.on)
    row_dropout_factors(args.dropout, row, args.n, args.dropout_columns, work.factors);
  float total[1];
  row_sums(args.n, total, [&](Vec* to, long j, long count) __attribute__((always_inline)) {
    Vec s = load_some(x + j, count);
    if (add) {
      if (args.dropout.on) s = drop(s, load_some(work.factors + j, count));
      s = rounded(s + load_some(residual + j, count), x);
      store_some(sum + j, s, count);
    }
    store(work.row + j, s);
    to[0] = to[0] + s;
  });
  return total[0];
}

template <class T>
void rows(const LayerNormArgs& args, long begin, long end, const Workspace& work) {
  const long n = args.n;
  for (long row = begin; row < end; ++row) {
    float mean, rstd;
    row_statistics(
        args, begin_row<T>(args, row, work),
        [&](float c) { return sum_of_squares(work.row, n, c); }, mean, rstd);
    T* y = static_cast<T*>(args.y) + row * n;
    const auto normal = [&](long j) __attribute__((always_inline)) {
      return fma((load(work.row + j) - set1(mean)) * set1(rstd), load(work.weight + j),
                 load(work.bias + j));
    };
    long j = 0;
    for (; j + kLanes <= n; j += kLanes) store(y + j, normal(j));
    if (j < n) store_n(y + j, normal(j), n - j);
    if (args.mean != nullptr) args.mean[row] = mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
}

}  // namespace

long lowp_layer_norm_scratch(const LayerNormArgs& args) {
  return (4 * room(args.n) + 2 * kLanes) * static_cast<long>(sizeof(float));
}

void lowp_layer_norm_rows(const LayerNormArgs& args, long begin, long end, void* scratch) {
  const Workspace work(scratch, args.n);
  widen(args.weight, args.weight_type, args.n, 1.0f, work.weight);
  widen(args.bias, args.weight_type, args.n, 0.0f, work.bias);
  (args.type == Element::bfloat16 ? rows<BFloat16> : rows<Float16>)(args, begin, end, work);
}

}  // namespace tf::TF_ISA
