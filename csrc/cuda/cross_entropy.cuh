// Cross entropy of logits with label smoothing, and its gradient.
//
//   loss[n] = (1 - s) (lse[n] - x[n, target[n]]) + s (lse[n] - mean over v of x[n, v])
//   dx[n, v] = grad[n] (exp(x[n, v] - lse[n]) - (1 - s) [v is target[n]] - s / V)
//
// Forward: logits are read once, and each thread rescales its sum of exponentials when its maximum
// grows. lse is saved as the sum of two fp32 numbers, because rounding an lse of 100 to one would
// cost the probabilities 6 bits. A row whose target is `ignored` is not read.
#pragma once

#include "cuda/launch.cuh"

namespace tf::cuda {

struct CrossEntropyArgs {
  Element type;
  const void* logits;     // (rows, columns)
  const int64_t* target;  // (rows), target_stride elements apart
  int64_t rows, columns, row_stride, column_stride, target_stride, ignored;
  float smoothing;
  float* losses;  // (rows)
  float* lse;     // (rows, 2): lse rounded to fp32, and its rounding error
};

struct CrossEntropyBackwardArgs {
  CrossEntropyArgs call;  // lse is read, losses are not used
  const float* grad;      // (rows), grad_stride elements apart
  int64_t grad_stride;
  void* gradient;  // (rows, columns) contiguous
};

template <class T, int kVector>
TF_DEVICE void load_logits(const CrossEntropyArgs& args, int64_t row, int64_t column,
                           float (&x)[kVector]) {
  const T* from = static_cast<const T*>(args.logits) + row * args.row_stride;
  if constexpr (kVector == 1)
    x[0] = to_float(from[column * args.column_stride]);
  else
    load(x, from + column);
}

template <class T, int kThreads, int kVector>
__global__ void __launch_bounds__(kThreads == kWarp ? 4 * kWarp : kThreads)
    cross_entropy_kernel(const CrossEntropyArgs args) {
  constexpr int kRows = kThreads == kWarp ? 4 : 1;
  TF_SHARED(shared);
  float* scratch = reinterpret_cast<float*>(shared);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % kThreads;
  const int64_t target = args.target[row * args.target_stride];
  if (target == args.ignored) {
    if (lane == 0) args.losses[row] = args.lse[2 * row] = args.lse[2 * row + 1] = 0.0f;
    return;
  }
  // A target that is not a class gives the loss NaN, because a kernel cannot raise an exception.
  float x_target[1] = {NAN};
  if (target >= 0 && target < args.columns) load_logits<T>(args, row, target, x_target);
  // Sums the differences from the target's logit, because logits far from 0 would lose precision.
  const float origin = fabsf(x_target[0]) < INFINITY ? x_target[0] : 0.0f;
  float peak = -INFINITY, sum = 0.0f, distances = 0.0f;
  for (int64_t column = lane * kVector; column < args.columns; column += kThreads * kVector) {
    float x[kVector], larger = peak;
    load_logits<T>(args, row, column, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) larger = fmaxf(larger, x[j]);
    // While all logits are -inf the base is 0, because -inf - -inf would be NaN.
    const float base = larger == -INFINITY ? 0.0f : larger;
    sum *= expf(peak - base);
    peak = larger;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sum += expf(x[j] - base);
      distances += x[j] - origin;
    }
  }
  const float highest = reduce<kThreads>(peak, Maximum{}, scratch);
  sum *= expf(peak - (highest == -INFINITY ? 0.0f : highest));
  const float log_sum = logf(reduce<kThreads>(sum, Add{}, scratch));
  float loss = (1.0f - args.smoothing) * ((highest - x_target[0]) + log_sum);
  if (args.smoothing != 0.0f) {
    const float mean = reduce<kThreads>(distances, Add{}, scratch) / args.columns;
    loss += args.smoothing * (((highest - origin) - mean) + log_sum);
  }
  if (lane == 0) {
    args.losses[row] = loss;
    const double exact = static_cast<double>(highest) + static_cast<double>(log_sum);
    const float high = static_cast<float>(exact);
    args.lse[2 * row] = high;
    args.lse[2 * row + 1] = static_cast<float>(exact - high);
  }
}

constexpr int kGradientThreads = 256, kGradientVectors = 4;

template <class T, int kVector>
__global__ void __launch_bounds__(kGradientThreads)
    cross_entropy_backward_kernel(const CrossEntropyBackwardArgs args) {
  const CrossEntropyArgs& call = args.call;
  const int64_t row = blockIdx.x;
  const int64_t target = call.target[row * call.target_stride];
  const bool counted = target != call.ignored;
  const float high = call.lse[2 * row], low = call.lse[2 * row + 1];
  const float grad = counted ? args.grad[row * args.grad_stride] : 0.0f;
  const float confidence = 1.0f - call.smoothing, share = call.smoothing / call.columns;
#pragma unroll
  for (int i = 0; i < kGradientVectors; ++i) {
    const int64_t column =
        ((static_cast<int64_t>(blockIdx.y) * kGradientVectors + i) * kGradientThreads +
         threadIdx.x) *
        kVector;
    if (column >= call.columns) return;
    float x[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = 0.0f;
    if (counted) {
      load_logits<T>(call, row, column, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float p = expf((x[j] - high) - low);
        x[j] = grad * ((p - share) - (column + j == target ? confidence : 0.0f));
      }
    }
    store(static_cast<T*>(args.gradient) + row * call.columns + column, x);
  }
}

inline bool wide_logits(const CrossEntropyArgs& args) {
  const int64_t vector = 16 / size_of(args.type);
  return args.column_stride == 1 && args.columns % vector == 0 && args.row_stride % vector == 0 &&
         aligned(args.logits);
}

inline void launch_cross_entropy(const CrossEntropyArgs& args, Stream stream) {
  if (args.rows == 0) return;
  const auto run = [&]<class T, int kThreads, int kVector>() {
    constexpr int kRows = kThreads == kWarp ? 4 : 1;
    launch(cross_entropy_kernel<T, kThreads, kVector>,
           dim3(static_cast<unsigned>(ceil_div(args.rows, kRows))), kRows * kThreads,
           kThreads / kWarp * sizeof(float), stream, args);
  };
  by_element(args.type, [&]<class T>(T) {
    constexpr int kVector = 16 / sizeof(T);
    const bool wide = wide_logits(args), few = args.columns <= 1024;
    if (wide && few) return run.template operator()<T, kWarp, kVector>();
    if (wide) return run.template operator()<T, 256, kVector>();
    if (few) return run.template operator()<T, kWarp, 1>();
    run.template operator()<T, 256, 1>();
  });
}

inline void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, Stream stream) {
  const CrossEntropyArgs& call = args.call;
  if (call.rows * call.columns == 0) return;
  const auto run = [&]<class T, int kVector>() {
    const int64_t columns = int64_t{kGradientThreads} * kGradientVectors * kVector;
    if (call.columns > 65535 * columns)
      throw std::runtime_error("cross_entropy: " + std::to_string(call.columns) +
                               " classes are more than one launch supports");
    launch(cross_entropy_backward_kernel<T, kVector>,
           dim3(static_cast<unsigned>(call.rows),
                static_cast<unsigned>(ceil_div(call.columns, columns))),
           kGradientThreads, 0, stream, args);
  };
  by_element(call.type, [&]<class T>(T) {
    if (wide_logits(call) && aligned(args.gradient))
      return run.template operator()<T, 16 / sizeof(T)>();
    run.template operator()<T, 1>();
  });
}

}  // namespace tf::cuda
