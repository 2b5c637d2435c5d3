// LayerNorm, alone and after dropout and a residual connection, forward and backward.
//
//   sum = residual + dropout(input)
//   y = (sum - mean) rstd weight + bias,  rstd = 1 / sqrt(var + eps)
//
// Forward: a warp per row, or a block per long row. The row is read once and stays in registers;
// the mean is computed before the squares. Rows too long for registers are read three times.
//
// Backward: a fixed number of blocks loop over the rows and accumulate partial sums over rows in
// registers. The next row is read before the sums of the current one are reduced. A second kernel
// adds up the partial sums. No atomics, so results are the same in every run.
#pragma once

#include "cuda/column_sums.cuh"

namespace tf::cuda {

struct LayerNormArgs {
  Element type;
  const void *input, *residual;  // (rows, columns), with row strides below; residual may be null
  const void *weight, *bias;     // (columns); may be null
  void *output, *sum;            // (rows, columns) contiguous; sum is null without residual
  float *mean, *rstd;            // (rows)
  int64_t rows, columns, input_stride, residual_stride;
  float eps;
  Dropout dropout;          // of input, if there is a residual
  int64_t dropout_columns;  // size of the last dimension of input
};

struct LayerNormBackwardArgs {
  Element type;
  const void *grad, *grad_sum, *input;  // (rows, columns); grad_sum may be null
  const void* weight;                   // (columns); may be null
  const float *mean, *rstd;             // (rows)
  void* grad_source;              // (rows, columns) contiguous: of the norm's input; may be null
  void* grad_input;               // (rows, columns) contiguous: before dropout; may be null
  void *grad_weight, *grad_bias;  // (columns); may be null
  float* partial;                 // (2, shares, columns); null if both of these are null
  int64_t rows, columns, grad_stride, grad_sum_stride, input_stride, shares;
  Dropout dropout;
  int64_t dropout_columns;
};

// A row in the registers of kThreads threads, kElements each, in vectors of kVector contiguous
// elements. kElements = 0: the row does not fit, and is read again whenever it is needed.
template <int kThreads, int kElements, int kVector>
struct RowTile {
  static constexpr int threads = kThreads, elements = kElements, vector = kVector;
  static constexpr int block = kThreads == kWarp ? 4 * kWarp : kThreads;
  static constexpr int rows = block / kThreads;
  static constexpr int kept = kElements == 0 ? kVector : kElements;
  // True if the backward reads the next row while it reduces the current one; this takes up to 16
  // registers.
  static constexpr bool prefetches = kElements != 0 && kVector > 1 && kElements <= 2 * kVector;

  // Calls f(index of the thread's vector, column) for all vectors of this thread in the row.
  template <class F>
  TF_DEVICE static void each(int64_t columns, const F& f) {
    const int lane = threadIdx.x % kThreads;
    if constexpr (kElements == 0) {
      for (int64_t column = lane * kVector; column < columns; column += kThreads * kVector)
        f(0, column);
    } else {
#pragma unroll
      for (int i = 0; i < kElements / kVector; ++i) {
        const int64_t column = (static_cast<int64_t>(i) * kThreads + lane) * kVector;
        if (column < columns) f(i, column);
      }
    }
  }
};

// Rows of the dropout pattern are those of the tensor's last dimension. If normalized_shape has
// more dimensions, kVector is 1.
template <int kVector, class Args>
TF_DEVICE void row_dropout_factors(const Args& args, uint64_t row, uint64_t column,
                                   float (&factors)[kVector]) {
  if constexpr (kVector == 1) {
    const uint64_t at = row * args.columns + column, columns = args.dropout_columns;
    if (args.columns != args.dropout_columns) row = at / columns, column = at % columns;
  }
  dropout_factors(args.dropout, row, column, factors);
}

template <class T, class Tile>
TF_DEVICE void residual_sum(const LayerNormArgs& args, int64_t row, int64_t column,
                            float (&x)[Tile::vector]) {
  constexpr int kVector = Tile::vector;
  load(x, static_cast<const T*>(args.input) + row * args.input_stride + column);
  if (args.residual == nullptr) return;
  float other[kVector];
  load(other, static_cast<const T*>(args.residual) + row * args.residual_stride + column);
  if (args.dropout.on) {
    float factors[kVector];
    row_dropout_factors(args, row, column, factors);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = drop(x[j], factors[j]);
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) x[j] = rounded<T>(x[j] + other[j]);
  store(static_cast<T*>(args.sum) + row * args.columns + column, x);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::block) layer_norm_kernel(const LayerNormArgs args) {
  constexpr int kVector = Tile::vector;
  constexpr bool kAtOnce = Tile::elements != 0;
  TF_SHARED(shared);
  float* scratch = reinterpret_cast<float*>(shared);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Tile::rows + threadIdx.x / Tile::threads;
  if (row >= args.rows) return;
  float x[Tile::kept / kVector][kVector];

  float total = 0.0f;
  Tile::each(args.columns, [&](int i, int64_t column) {
    residual_sum<T, Tile>(args, row, column, x[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) total += x[i][j];
  });
  const float mean =
      reduce<Tile::threads>(total, Add{}, scratch) / static_cast<float>(args.columns);

  // Each thread reads back only sums that it wrote itself, so no barrier is needed.
  const auto again = [&](int i, int64_t column) {
    if constexpr (!kAtOnce) {
      if (args.residual != nullptr)
        load(x[i], static_cast<const T*>(args.sum) + row * args.columns + column);
      else
        load(x[i], static_cast<const T*>(args.input) + row * args.input_stride + column);
    }
  };
  float squares = 0.0f;
  Tile::each(args.columns, [&](int i, int64_t column) {
    again(i, column);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float centred = x[i][j] - mean;
      squares += centred * centred;
    }
  });
  const float variance =
      reduce<Tile::threads>(squares, Add{}, scratch) / static_cast<float>(args.columns);
  const float rstd = 1.0f / sqrtf(variance + args.eps);
  if (threadIdx.x % Tile::threads == 0) {
    args.mean[row] = mean;
    args.rstd[row] = rstd;
  }

  Tile::each(args.columns, [&](int i, int64_t column) {
    again(i, column);
    float y[kVector], parameter[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) y[j] = (x[i][j] - mean) * rstd;
    if (args.weight != nullptr) {
      load(parameter, static_cast<const T*>(args.weight) + column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) y[j] *= parameter[j];
    }
    if (args.bias != nullptr) {
      load(parameter, static_cast<const T*>(args.bias) + column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) y[j] += parameter[j];
    }
    store(static_cast<T*>(args.output) + row * args.columns + column, y);
  });
}

// With a prefetch a multiprocessor runs 512 threads with 128 registers each: four blocks of 128
// threads, which is the number of blocks that are launched (layer_norm_backward_shares).
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::block, Tile::prefetches ? 512 / Tile::block : 0)
    layer_norm_backward_kernel(const LayerNormBackwardArgs args) {
  constexpr int kVector = Tile::vector, kVectors = Tile::kept / kVector;
  constexpr bool kAtOnce = Tile::elements != 0;
  TF_SHARED(shared);
  float* scratch = reinterpret_cast<float*>(shared);
  const int group = threadIdx.x / Tile::threads;
  const float share = 1.0f / static_cast<float>(args.columns);
  const bool sums = kAtOnce && args.partial != nullptr;
  float weight_sum[kVectors][kVector], bias_sum[kVectors][kVector];
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
#pragma unroll
    for (int j = 0; j < kVector; ++j) weight_sum[i][j] = bias_sum[i][j] = 0.0f;

  Chunk<T> next_input[Tile::prefetches ? kVectors : 1], next_grad[Tile::prefetches ? kVectors : 1];
  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto prefetch = [&](int64_t row) {
    if constexpr (Tile::prefetches) {
      if (row >= args.rows) return;
      next_mean = args.mean[row], next_rstd = args.rstd[row];
      Tile::each(args.columns, [&](int i, int64_t column) {
        next_input[i].read(static_cast<const T*>(args.input) + row * args.input_stride + column);
        next_grad[i].read(static_cast<const T*>(args.grad) + row * args.grad_stride + column);
      });
    }
  };

  const int64_t step = static_cast<int64_t>(gridDim.x) * Tile::rows;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * Tile::rows + group;
  prefetch(begin);
  for (int64_t row = begin; row < args.rows; row += step) {
    const float mean = Tile::prefetches ? next_mean : args.mean[row];
    const float rstd = Tile::prefetches ? next_rstd : args.rstd[row];
    float normal[kVectors][kVector], scaled[kVectors][kVector];
    const auto read = [&](int i, int64_t column, bool first) {
      float weight[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) weight[j] = 1.0f;
      if constexpr (Tile::prefetches) {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          normal[i][j] = next_input[i][j], scaled[i][j] = next_grad[i][j];
      } else {
        load(normal[i], static_cast<const T*>(args.input) + row * args.input_stride + column);
        load(scaled[i], static_cast<const T*>(args.grad) + row * args.grad_stride + column);
      }
      if (args.weight != nullptr) load(weight, static_cast<const T*>(args.weight) + column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        normal[i][j] = (normal[i][j] - mean) * rstd;
        if (first) {
          weight_sum[i][j] += scaled[i][j] * normal[i][j];
          bias_sum[i][j] += scaled[i][j];
        }
        scaled[i][j] *= weight[j];
      }
    };
    float plain = 0.0f, along = 0.0f;
    Tile::each(args.columns, [&](int i, int64_t column) {
      read(i, column, true);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        plain += scaled[i][j];
        along += scaled[i][j] * normal[i][j];
      }
    });
    prefetch(row + step);
    if (args.grad_source == nullptr && args.grad_input == nullptr) continue;
    plain = reduce<Tile::threads>(plain, Add{}, scratch) * share;
    along = reduce<Tile::threads>(along, Add{}, scratch) * share;
    Tile::each(args.columns, [&](int i, int64_t column) {
      if constexpr (!kAtOnce) read(i, column, false);
      float gradient[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        gradient[j] = ((scaled[i][j] - plain) - normal[i][j] * along) * rstd;
      if (args.grad_sum != nullptr) {
        float other[kVector];
        load(other, static_cast<const T*>(args.grad_sum) + row * args.grad_sum_stride + column);
#pragma unroll
        for (int j = 0; j < kVector; ++j) gradient[j] += other[j];
      }
      const int64_t at = row * args.columns + column;
      if (args.grad_source != nullptr) store(static_cast<T*>(args.grad_source) + at, gradient);
      if (args.grad_input != nullptr) {
        float factors[kVector];
        row_dropout_factors(args, row, column, factors);
#pragma unroll
        for (int j = 0; j < kVector; ++j) gradient[j] = drop(gradient[j], factors[j]);
        store(static_cast<T*>(args.grad_input) + at, gradient);
      }
    });
  }

  if (!sums) return;
  float* weight_shares = args.partial + blockIdx.x * args.columns;
  float* bias_shares = weight_shares + args.shares * args.columns;
  if constexpr (Tile::rows == 1) {
    Tile::each(args.columns, [&](int i, int64_t column) {
      store(weight_shares + column, weight_sum[i]);
      store(bias_shares + column, bias_sum[i]);
    });
  } else {
    // (2, rows of the block, columns)
    Tile::each(args.columns, [&](int i, int64_t column) {
      store(scratch + group * args.columns + column, weight_sum[i]);
      store(scratch + (Tile::rows + group) * args.columns + column, bias_sum[i]);
    });
    __syncthreads();
    for (int64_t column = threadIdx.x; column < args.columns; column += Tile::block) {
      float of_weight = 0.0f, of_bias = 0.0f;
#pragma unroll
      for (int r = 0; r < Tile::rows; ++r) {
        of_weight += scratch[r * args.columns + column];
        of_bias += scratch[(Tile::rows + r) * args.columns + column];
      }
      weight_shares[column] = of_weight;
      bias_shares[column] = of_bias;
    }
  }
}

// Partial sums over rows that are too long for registers; one thread per column.
template <class T>
__global__ void __launch_bounds__(256) layer_norm_shares_kernel(const LayerNormBackwardArgs args) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (column >= args.columns) return;
  float of_weight = 0.0f, of_bias = 0.0f;
  for (int64_t row = blockIdx.y; row < args.rows; row += args.shares) {
    const float grad = to_float(static_cast<const T*>(args.grad)[row * args.grad_stride + column]);
    const float x = to_float(static_cast<const T*>(args.input)[row * args.input_stride + column]);
    of_weight += grad * ((x - args.mean[row]) * args.rstd[row]);
    of_bias += grad;
  }
  args.partial[blockIdx.y * args.columns + column] = of_weight;
  args.partial[(args.shares + blockIdx.y) * args.columns + column] = of_bias;
}

// Calls f(RowTile{}) with the smallest tile that fits the columns, in vectors of 16 bytes if
// `wide`.
template <class T, class F>
void by_tile(bool wide, int64_t columns, const F& f) {
  constexpr int kVector = 16 / sizeof(T);
  if (wide) {
    if (columns <= 256) return f(RowTile<kWarp, 8, kVector>{});
    if (columns <= 512) return f(RowTile<kWarp, 16, kVector>{});
    if (columns <= 2048) return f(RowTile<128, 16, kVector>{});
    if (columns <= 8192) return f(RowTile<512, 16, kVector>{});
    return f(RowTile<512, 0, kVector>{});
  }
  if (columns <= 512) return f(RowTile<kWarp, 16, 1>{});
  if (columns <= 8192) return f(RowTile<512, 16, 1>{});
  f(RowTile<512, 0, 1>{});
}

inline bool vectors_fit(const Dropout& dropout, int64_t columns, int64_t dropout_columns) {
  return !dropout.on || dropout_columns == columns;
}

inline void launch_layer_norm(const LayerNormArgs& args, Stream stream) {
  if (args.rows * args.columns == 0) return;
  const int64_t vector = 16 / size_of(args.type);
  const bool wide = args.columns % vector == 0 && args.input_stride % vector == 0 &&
                    args.residual_stride % vector == 0 && aligned(args.input) &&
                    aligned(args.residual) && aligned(args.weight) && aligned(args.bias) &&
                    vectors_fit(args.dropout, args.columns, args.dropout_columns);
  by_element(args.type, [&]<class T>(T) {
    by_tile<T>(wide, args.columns, [&]<class Tile>(Tile) {
      launch(layer_norm_kernel<T, Tile>,
             dim3(static_cast<unsigned>(ceil_div(args.rows, Tile::rows))), Tile::block,
             Tile::threads / kWarp * sizeof(float), stream, args);
    });
  });
}

// Number of blocks that loop over the rows; each has partial sums over rows.
inline int64_t layer_norm_backward_shares(int64_t rows) {
  const int64_t most = 4 * multiprocessors();
  return rows < most ? rows : most;
}

inline void launch_layer_norm_backward(const LayerNormBackwardArgs& args, Stream stream) {
  if (args.columns == 0) return;
  const int64_t vector = 16 / size_of(args.type);
  const bool wide = args.columns % vector == 0 && args.grad_stride % vector == 0 &&
                    args.grad_sum_stride % vector == 0 && args.input_stride % vector == 0 &&
                    aligned(args.grad) && aligned(args.grad_sum) && aligned(args.input) &&
                    aligned(args.weight) &&
                    vectors_fit(args.dropout, args.columns, args.dropout_columns);
  by_element(args.type, [&]<class T>(T) {
    if (args.rows > 0)
      by_tile<T>(wide, args.columns, [&]<class Tile>(Tile) {
        size_t shared = Tile::threads / kWarp * sizeof(float);
        if (Tile::rows > 1) shared = 2 * Tile::rows * args.columns * sizeof(float);
        const bool at_once = Tile::elements != 0;
        if (at_once || args.grad_source != nullptr || args.grad_input != nullptr)
          launch(layer_norm_backward_kernel<T, Tile>, dim3(static_cast<unsigned>(args.shares)),
                 Tile::block, shared, stream, args);
        if (!at_once && args.partial != nullptr)
          launch(layer_norm_shares_kernel<T>,
                 dim3(static_cast<unsigned>(ceil_div(args.columns, 256)),
                      static_cast<unsigned>(args.shares)),
                 256, 0, stream, args);
      });
    if (args.partial != nullptr)
      column_sums<T>(
          {args.type, args.partial, {args.grad_weight, args.grad_bias}, args.shares, args.columns},
          stream);
  });
}

}  // namespace tf::cuda
