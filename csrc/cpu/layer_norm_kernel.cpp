// LayerNorm (Ba et al. 2016). The row is in cache after the first pass, so memory is read once; the
// variance is taken around the mean, never as E[x^2] - E[x]^2.
#include "cpu/layer_norm_kernel.h"

#include "cpu/philox.h"
#include "cpu/vec.h"

namespace tf::TF_ISA {
namespace {

// Calls f(offset, Vec) -> Vec-consuming code for whole vectors and then for the tail of a row.
template <class F>
TF_INLINE void each_vector(long n, const F& f) {
  long j = 0;
  for (; j + kLanes <= n; j += kLanes) f(j, static_cast<long>(kLanes));
  if (j < n) f(j, n - j);
}

TF_INLINE Vec load_some(const float* p, long n) { return n == kLanes ? load(p) : load_n(p, n); }
TF_INLINE void store_some(float* p, Vec x, long n) { n == kLanes ? store(p, x) : store_n(p, x, n); }

// What dropout multiplies a row of x by, in scratch.
void row_factors(const LayerNormArgs& args, long row, float* factors) {
  const long columns = args.dropout_columns, rows = args.n / columns;
  // In this order what is written beyond one row is overwritten by the next.
  for (long r = 0; r < rows; ++r)
    dropout_factors(args.dropout, static_cast<uint64_t>(row * rows + r), 0, columns,
                    factors + r * columns);
}

void one_row(const LayerNormArgs& args, long row, float* factors) {
  const long n = args.n;
  const float* x = args.x + row * args.x_stride;
  float* y = args.y + row * n;
  const float* source = x;
  Vec total[4] = {zero(), zero(), zero(), zero()};
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * args.residual_stride;
    float* sum = args.sum + row * n;
    if (args.dropout.on) row_factors(args, row, factors);
    each_vector(n, [&](long j, long count) {
      Vec s = load_some(x + j, count);
      if (args.dropout.on) s = drop(s, load_some(factors + j, count));
      s = s + load_some(residual + j, count);
      store_some(sum + j, s, count);
      total[0] = total[0] + s;
    });
    source = sum;
  } else {
    long j = 0;
    for (; j + 4 * kLanes <= n; j += 4 * kLanes)
      TF_UNROLL for (int u = 0; u < 4; ++u) total[u] = total[u] + load(x + j + u * kLanes);
    for (; j < n; j += kLanes)
      total[0] = total[0] + load_some(x + j, n - j < kLanes ? n - j : kLanes);
  }
  const float mean =
      reduce_add((total[0] + total[1]) + (total[2] + total[3])) / static_cast<float>(n);

  const Vec centre = set1(mean);
  Vec square[4] = {zero(), zero(), zero(), zero()};
  long j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    TF_UNROLL for (int u = 0; u < 4; ++u) {
      const Vec d = load(source + j + u * kLanes) - centre;
      square[u] = fma(d, d, square[u]);
    }
  }
  for (; j + kLanes <= n; j += kLanes) {
    const Vec d = load(source + j) - centre;
    square[0] = fma(d, d, square[0]);
  }
  float rest = 0.0f;
  for (; j < n; ++j) rest += (source[j] - mean) * (source[j] - mean);
  const float variance = (reduce_add((square[0] + square[1]) + (square[2] + square[3])) + rest) /
                         static_cast<float>(n);
  const float terms = static_cast<float>(n);
  const float rstd = args.annotated
                         ? 1.0f / (__builtin_sqrtf(variance * (terms / (terms - 1.0f))) + args.eps)
                         : 1.0f / __builtin_sqrtf(variance + args.eps);

  const Vec scale = set1(rstd);
  each_vector(n, [&](long i, long count) {
    Vec value = (load_some(source + i, count) - centre) * scale;
    if (args.weight != nullptr) value = value * load_some(args.weight + i, count);
    if (args.bias != nullptr) value = value + load_some(args.bias + i, count);
    store_some(y + i, value, count);
  });
  if (args.mean != nullptr) args.mean[row] = mean;
  if (args.rstd != nullptr) args.rstd[row] = rstd;
}

}  // namespace

long layer_norm_scratch(const LayerNormArgs& args) {
  return args.dropout.on ? args.n + 2 * kLanes : 0;
}

void layer_norm_rows(const LayerNormArgs& args, long begin, long end, float* scratch) {
  for (long row = begin; row < end; ++row) one_row(args, row, scratch);
}

}  // namespace tf::TF_ISA
