// Launches every kernel on sizes that are no multiples of any tile, under AddressSanitizer and
// ThreadSanitizer. The memory ends where the tensors do. Other tests check the results; here every
// output must be written, and must not be NaN.
#include <string>
#include <vector>

#include "cuda/cross_entropy.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/layer_norm.cuh"
#include "simt_memory.h"

namespace {

using namespace tf::cuda;

template <class T>
void norms(int64_t rows, int64_t columns) {
  const int64_t count = rows * columns, seed = 7;
  const Dropout dropout{true, &seed, 1u << 14, 4.0f / 3.0f};
  const Array<T> input(count), residual(count), weight(columns), bias(columns), grad(count);
  Array<T> output(count, false), sum(count, false);
  Array<float> mean(rows, false), rstd(rows, false);
  launch_layer_norm({kType<T>, input, residual, weight, bias, output, sum, mean, rstd, rows,
                     columns, columns, columns, 1e-5f, dropout, columns},
                    nullptr);
  output.check("output");
  sum.check("sum");
  mean.check("mean");
  rstd.check("rstd");
  const int64_t shares = layer_norm_backward_shares(rows);
  Array<float> partial(2 * shares * columns, false);
  Array<T> source(count, false), dropped(count, false), of_weight(columns, false),
      of_bias(columns, false);
  launch_layer_norm_backward(
      {kType<T>, grad,    input, sum,     weight,  mean,    rstd,    source, dropped, of_weight,
       of_bias,  partial, rows,  columns, columns, columns, columns, shares, dropout, columns},
      nullptr);
  source.check("grad_source");
  dropped.check("grad_input");
  of_weight.check("grad_weight");
  of_bias.check("grad_bias");
}

template <class T>
void maps(int64_t rows, int64_t columns) {
  const int64_t count = rows * columns, seed = 7;
  const Dropout dropout{true, &seed, 1u << 14, 4.0f / 3.0f};
  const Array<T> z(count), residual(count), grad(count);
  Array<T> output(count, false), grad_z(count, false), hidden(count, false),
      grad_bias(columns, false);
  launch_epilogue(
      {kType<T>, Activation::gelu, z, residual, output, rows, columns, columns, dropout}, nullptr);
  output.check("output");
  const int64_t shares = epilogue_shares(kType<T>, rows, columns);
  Array<float> partial(shares * columns, false);
  launch_epilogue_backward({kType<T>, Activation::gelu_tanh, grad, z, grad_z, hidden, grad_bias,
                            partial, rows, columns, columns, shares, dropout},
                           nullptr);
  grad_z.check("grad_z");
  hidden.check("hidden");
  grad_bias.check("grad_bias of a map");
}

template <class T>
void losses(int64_t rows, int64_t columns) {
  const Array<T> logits(rows * columns);
  const Array<float> grad(rows);
  std::unique_ptr<int64_t[]> target(new int64_t[rows]);
  for (int64_t row = 0; row < rows; ++row) target[row] = row == 1 ? -100 : row % columns;
  Array<float> found(rows, false), lse(2 * rows, false);
  const CrossEntropyArgs args{kType<T>, logits, target.get(), rows, columns, columns,
                              1,        1,      -100,         0.1f, found,   lse};
  launch_cross_entropy(args, nullptr);
  found.check("losses");
  lse.check("lse");
  Array<T> gradient(rows * columns, false);
  launch_cross_entropy_backward({args, grad, 1, gradient}, nullptr);
  gradient.check("gradient");
}

}  // namespace

int main() {
  norms<float>(6, 5);    // a warp per row
  norms<bf16>(11, 264);  // vectorized
  norms<fp16>(2, 515);   // a block per row
  norms<bf16>(2, 520);   // vectorized
  norms<bf16>(1, 8200);  // rows longer than the registers
  maps<bf16>(150, 264);  // vectorized; blocks loop over rows
  maps<float>(9, 33);
  losses<float>(3, 3);    // a warp per row
  losses<bf16>(2, 2064);  // a block per row, vectorized
  losses<float>(2, 1031);
  std::puts("done");
}
