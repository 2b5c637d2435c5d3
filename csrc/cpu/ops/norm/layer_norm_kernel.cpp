// Norms in float32. The row is in cache after the first pass, so memory is read once; the variance
// is computed around the mean, never as E[x^2] - E[x]^2.
#include "cpu/ops/norm/layer_norm.h"
#include "cpu/simd/column_sums.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
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

}  // namespace tf::TF_ISA
