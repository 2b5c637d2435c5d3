// Epilogue of the product of a linear layer, and its gradient.
//
//   forward:   output = dropout(activation(z)) + residual
//   backward:  dz = dropout(grad) activation'(z), and the sums of its columns
//
// z is the product plus the bias. A warp has 32 vectors of a row. The warps of a block loop over
// the rows of its columns. There are as many blocks as the GPU can run at once, and each writes
// partial sums.
#pragma once

#include "cuda/column_sums.cuh"

namespace tf::cuda {

// Numbered as in transformer_fast/ops/linear.py.
enum class Activation : int { identity = 0, relu = 1, gelu = 2, gelu_tanh = 3, silu = 4 };

struct EpilogueArgs {
  Element type;
  Activation activation;
  const void* z;         // (rows, columns) contiguous
  const void* residual;  // (rows, columns), rows residual_stride elements apart; may be null
  void* output;          // (rows, columns) contiguous; may be z
  int64_t rows, columns, residual_stride;
  Dropout dropout;
};

struct EpilogueBackwardArgs {
  Element type;
  Activation activation;
  const void* grad;  // (rows, columns), rows grad_stride elements apart
  const void* z;     // (rows, columns) contiguous; may be null without an activation
  void* grad_z;      // (rows, columns) contiguous; may be null; may be grad
  void* hidden;      // (rows, columns) contiguous: dropout(activation(z)); may be null
  void* grad_bias;   // (columns); may be null
  float* partial;    // (shares, columns): partial sums of grad_bias; null without grad_bias
  int64_t rows, columns, grad_stride, shares;
  Dropout dropout;
};

// s = 1 / (1 + e^-x) and its derivative s (1 - s), computed without cancellation in 1 - s.
struct Sigmoid {
  float value, slope;

  TF_DEVICE explicit Sigmoid(float x) {
    const float e = expf(-x);
    value = 1.0f / (1.0f + e);
    slope = x < -87.0f ? 0.0f : e * value * value;
  }
};

constexpr float kSqrtHalf = 0.70710678f, kInverseSqrt2Pi = 0.39894228f;
constexpr float kTwiceSqrt2OverPi = 1.59576912f, kCubic = 0.044715f;

// x (1 + tanh u) / 2 is x sigmoid(2 u).
TF_DEVICE float gelu_tanh_argument(float x) { return kTwiceSqrt2OverPi * (x + kCubic * x * x * x); }

template <Activation kActivation>
TF_DEVICE float activate(float x) {
  if constexpr (kActivation == Activation::relu) return x < 0.0f ? 0.0f : x;  // NaN stays NaN
  if constexpr (kActivation == Activation::gelu) return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
  if constexpr (kActivation == Activation::gelu_tanh)
    return x * Sigmoid(gelu_tanh_argument(x)).value;
  if constexpr (kActivation == Activation::silu) return x * Sigmoid(x).value;
  return x;
}

// Returns activation'(x) * grad.
template <Activation kActivation>
TF_DEVICE float activation_gradient(float x, float grad) {
  if constexpr (kActivation == Activation::relu) return x <= 0.0f ? 0.0f : grad;
  if constexpr (kActivation == Activation::gelu) {
    const float density = kInverseSqrt2Pi * expf(-0.5f * x * x);
    return grad * (0.5f * (1.0f + erff(x * kSqrtHalf)) + x * density);
  }
  if constexpr (kActivation == Activation::gelu_tanh) {
    const Sigmoid s(gelu_tanh_argument(x));
    const float slope = kTwiceSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    // For large |x| the second factor is 0 and the third may be infinite.
    return grad * (s.value + (s.slope == 0.0f ? 0.0f : x * s.slope * slope));
  }
  if constexpr (kActivation == Activation::silu) {
    const Sigmoid s(x);
    return grad * (s.value + x * s.slope);
  }
  return grad;
}

// Calls f.operator()<activation>(); so the branch is per vector, not per element.
template <class F>
TF_DEVICE void by_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::relu:
      return f.template operator()<Activation::relu>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    default:
      return f.template operator()<Activation::identity>();
  }
}

constexpr int kEpilogueWarps = 8;

// Calls f(row, column of the thread's vector) for each row of the warp.
template <int kVector, class F>
TF_DEVICE void each_row(int64_t rows, int64_t columns, const F& f) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x % kWarp) * kVector;
  if (column >= columns) return;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kEpilogueWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kEpilogueWarps + threadIdx.x / kWarp;
       row < rows; row += step)
    f(row, column);
}

template <class T, int kVector>
__global__ void __launch_bounds__(kEpilogueWarps* kWarp) epilogue_kernel(const EpilogueArgs args) {
  each_row<kVector>(args.rows, args.columns, [&](int64_t row, int64_t column) {
    float x[kVector];
    load(x, static_cast<const T*>(args.z) + row * args.columns + column);
    by_activation(args.activation, [&]<Activation kActivation>() {
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[j] = activate<kActivation>(x[j]);
    });
    if (args.dropout.on) {
      float factors[kVector];
      dropout_factors(args.dropout, row, column, factors);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[j] = drop(x[j], factors[j]);
    }
    if (args.residual != nullptr) {
      float other[kVector];
      load(other, static_cast<const T*>(args.residual) + row * args.residual_stride + column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[j] += other[j];
    }
    store_global(static_cast<T*>(args.output) + row * args.columns + column, x);
  });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kEpilogueWarps* kWarp)
    epilogue_backward_kernel(const EpilogueBackwardArgs args) {
  TF_SHARED(shared);
  float* scratch = reinterpret_cast<float*>(shared);  // (warps, columns of the block)
  float sum[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum[j] = 0.0f;
  each_row<kVector>(args.rows, args.columns, [&](int64_t row, int64_t column) {
    const int64_t at = row * args.columns + column;
    float grad[kVector], factors[kVector];
    load(grad, static_cast<const T*>(args.grad) + row * args.grad_stride + column);
    if (args.dropout.on) {
      dropout_factors(args.dropout, row, column, factors);
#pragma unroll
      for (int j = 0; j < kVector; ++j) grad[j] = drop(grad[j], factors[j]);
    }
    if (args.z != nullptr) {
      float z[kVector];
      load(z, static_cast<const T*>(args.z) + at);
      by_activation(args.activation, [&]<Activation kActivation>() {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          grad[j] = activation_gradient<kActivation>(z[j], grad[j]);
          z[j] = activate<kActivation>(z[j]);
        }
      });
      if (args.hidden != nullptr) {
        if (args.dropout.on) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) z[j] = drop(z[j], factors[j]);
        }
        store_global(static_cast<T*>(args.hidden) + at, z);
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += grad[j];
    if (args.grad_z != nullptr) store_global(static_cast<T*>(args.grad_z) + at, grad);
  });
  if (args.partial == nullptr) return;
  constexpr int kColumns = kWarp * kVector;
  store(scratch + threadIdx.x * kVector, sum);
  __syncthreads();
  for (int i = threadIdx.x; i < kColumns; i += kEpilogueWarps * kWarp) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + i;
    if (column >= args.columns) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kEpilogueWarps; ++warp) total += scratch[warp * kColumns + i];
    args.partial[blockIdx.y * args.columns + column] = total;
  }
}

// Largest number of columns of a block, for both vector sizes.
inline int64_t epilogue_columns(Element type) { return kWarp * (16 / size_of(type)); }

// Number of blocks among which the rows of the same columns are divided.
inline int64_t epilogue_shares(Element type, int64_t rows, int64_t columns) {
  const int64_t across = ceil_div(columns > 0 ? columns : 1, epilogue_columns(type));
  const int64_t room = ceil_div(8 * multiprocessors(), across);
  const int64_t down = ceil_div(rows, kEpilogueWarps), most = room < down ? room : down;
  return most < 65535 ? most : 65535;
}

// Calls f.operator()<T, vector size>(); vectors have 16 bytes if `wide`, else one element.
template <class F>
void by_vector(Element type, bool wide, const F& f) {
  by_element(type, [&]<class T>(T) {
    if (wide) return f.template operator()<T, 16 / sizeof(T)>();
    f.template operator()<T, 1>();
  });
}

inline void launch_epilogue(const EpilogueArgs& args, Stream stream) {
  if (args.rows * args.columns == 0) return;
  const int64_t vector = 16 / size_of(args.type);
  const bool wide = args.columns % vector == 0 && args.residual_stride % vector == 0 &&
                    aligned(args.z) && aligned(args.residual) && aligned(args.output);
  const auto down = static_cast<unsigned>(epilogue_shares(args.type, args.rows, args.columns));
  by_vector(args.type, wide, [&]<class T, int kVector>() {
    launch(epilogue_kernel<T, kVector>,
           dim3(static_cast<unsigned>(ceil_div(args.columns, kWarp * kVector)), down),
           kEpilogueWarps * kWarp, 0, stream, args);
  });
}

inline void launch_epilogue_backward(const EpilogueBackwardArgs& args, Stream stream) {
  if (args.columns == 0) return;
  const int64_t vector = 16 / size_of(args.type);
  const bool wide = args.columns % vector == 0 && args.grad_stride % vector == 0 &&
                    aligned(args.grad) && aligned(args.z) && aligned(args.grad_z) &&
                    aligned(args.hidden);
  if (args.rows > 0)
    by_vector(args.type, wide, [&]<class T, int kVector>() {
      launch(epilogue_backward_kernel<T, kVector>,
             dim3(static_cast<unsigned>(ceil_div(args.columns, kWarp * kVector)),
                  static_cast<unsigned>(args.shares)),
             kEpilogueWarps * kWarp,
             args.partial != nullptr ? kEpilogueWarps * kWarp * kVector * sizeof(float) : 0, stream,
             args);
    });
  if (args.partial != nullptr)
    by_element(args.type, [&]<class T>(T) {
      column_sums<T>({args.type, args.partial, {args.grad_bias}, args.shares, args.columns},
                     stream);
    });
}

}  // namespace tf::cuda
