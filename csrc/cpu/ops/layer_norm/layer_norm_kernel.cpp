// Norms. The row is in cache after the first pass, so memory is read once; the variance is computed
// around the mean, never as E[x^2] - E[x]^2.
#include "cpu/ops/layer_norm/layer_norm.h"
#include "cpu/simd/column_sums.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

TF_INLINE Vec as_stored(Vec x, const float*) { return x; }
TF_INLINE Vec as_stored(Vec x, const BFloat16*) { return from_bf16(to_bf16(x)); }
TF_INLINE Vec as_stored(Vec x, const Float16*) { return from_fp16(to_fp16(x)); }

// Returns how many floats the factors of dropout and the padding behind them take.
Index factors_of(const LayerNormArgs& args) { return args.dropout.on ? args.n + 2 * kLanes : 0; }

// c = mean + offset, and r.
struct Statistics {
  float mean, offset, rstd;
};

// |mean| / standard deviation of a row above which the rounding error of its mean is corrected.
constexpr float kFar = 256.0f;

// Returns the statistics of a row with the sum `total`; at(offset, count) loads a vector of it.
template <class At>
TF_INLINE Statistics statistics_of(const LayerNormArgs& args, const At& at, float total) {
  const Index n = args.n;
  const float terms = static_cast<float>(terms_of(args.kind, n));
  Statistics found{};
  if (subtracts_mean(args.kind)) found.mean = total / static_cast<float>(n);
  float variance = sum_of_squares(at, n, found.mean) / terms;
  if (found.mean * found.mean > kFar * kFar * variance) {
    found.offset = sum_of_distances(at, n, found.mean) / static_cast<float>(n);
    variance = sum_of_squares(at, n, found.mean, 1.0f, found.offset) / terms;
  }
  found.rstd = eps_is_under_root(args.kind) ? 1.0f / __builtin_sqrtf(variance + args.eps)
                                            : 1.0f / (__builtin_sqrtf(variance) + args.eps);
  return found;
}

// Sums up to this size are held in float32 on the stack until the row is done: a load from memory
// waits for the store just before it unless it has the same place, size and no mask.
constexpr Index kHeld = 4 * kLanes;

// T: type of rows; W: type of weight and bias. `holds`: there is a residual, and n <= kHeld.
template <class T, class W, bool holds>
void one_row(const LayerNormArgs& args, Index row, float* factors) {
  const Index n = args.n;
  if (holds && n > kHeld) __builtin_unreachable();
  alignas(64) float held[kHeld];
  const T *x = static_cast<const T*>(args.x) + row * args.x_stride, *source = x;
  T* y = static_cast<T*>(args.y) + row * n;
  const auto at = [&](Index j, Index count) __attribute__((always_inline)) {
    return holds ? load(held + j) : load_some(source + j, count);
  };
  float total[1] = {0.0f};
  if (args.residual != nullptr) {
    const T* residual = static_cast<const T*>(args.residual) + row * args.residual_stride;
    T* sum = static_cast<T*>(args.sum) + row * n;
    if (args.dropout.on)
      row_dropout_factors(args.dropout, row, args.n, args.dropout_columns, factors);
    row_sums(n, total, [&](Vec* to, Index j, Index count) __attribute__((always_inline)) {
      Vec s = load_some(x + j, count);
      if (args.dropout.on) s = drop(s, load_some(factors + j, count));
      s = as_stored(s + load_some(residual + j, count), x);
      store_some(sum + j, s, count);
      if (holds) store(held + j, s);
      to[0] = to[0] + s;
    });
    source = sum;
  } else if (subtracts_mean(args.kind)) {
    row_sums(n, total, [&](Vec* to, Index j, Index count) __attribute__((always_inline)) {
      to[0] = to[0] + at(j, count);
    });
  }
  const Statistics statistics = statistics_of(args, at, total[0]);
  const W *weight = static_cast<const W*>(args.weight), *bias = static_cast<const W*>(args.bias);
  const Vec mean = set1(statistics.mean), scale = set1(statistics.rstd);
  const Vec offset = set1(-statistics.offset * statistics.rstd);
  each_vector(n, [&](Index j, Index count) {
    Vec value = fma(at(j, count) - mean, scale, offset);
    if (weight != nullptr) value = value * load_some(weight + j, count);
    if (bias != nullptr) value = value + load_some(bias + j, count);
    store_some(y + j, value, count);
  });
  if (args.mean != nullptr) args.mean[row] = statistics.mean + statistics.offset;
  if (args.rstd != nullptr) args.rstd[row] = statistics.rstd;
}

template <class T, class W>
void rows(const LayerNormArgs& args, Index begin, Index end, float* scratch) {
  const bool holds = args.residual != nullptr && args.n <= kHeld;
  for (Index row = begin; row < end; ++row)
    (holds ? one_row<T, W, true> : one_row<T, W, false>)(args, row, scratch);
}

}  // namespace

// The AVX-512 build of fp32 serves the instruction sets above it.
#if !defined(__AVX512BF16__)
Index layer_norm_scratch(const LayerNormArgs& args) {
  return factors_of(args) * static_cast<Index>(sizeof(float));
}

void layer_norm_rows(const LayerNormArgs& args, Index begin, Index end, void* scratch) {
  rows<float, float>(args, begin, end, static_cast<float*>(scratch));
}
#endif

namespace {

// Weights and biases up to this size are converted to float32 once for all rows; larger ones would
// leave no room for the row in the first-level cache.
constexpr Index kWidened = 2048;

template <class T>
void lowp_rows(LayerNormArgs args, Index begin, Index end, float* scratch) {
  if (args.weight_type != Element::float32) {
    if (args.n > kWidened) return rows<T, T>(args, begin, end, scratch);
    float* to = scratch + factors_of(args);
    args.weight = widened(static_cast<const T*>(args.weight), args.n, to);
    args.bias = widened(static_cast<const T*>(args.bias), args.n, to + args.n);
  }
  rows<T, float>(args, begin, end, scratch);
}

}  // namespace

Index lowp_layer_norm_scratch(const LayerNormArgs& args) {
  return (factors_of(args) + 2 * min(args.n, kWidened)) * static_cast<Index>(sizeof(float));
}

void lowp_layer_norm_rows(const LayerNormArgs& args, Index begin, Index end, void* scratch) {
  (args.type == Element::bfloat16
       ? lowp_rows<BFloat16>
       : lowp_rows<Float16>)(args, begin, end, static_cast<float*>(scratch));
}

}  // namespace tf::TF_ISA
