// Column sums in two stages: blocks write partial sums to memory, and a second kernel adds them up
// in a fixed order. No atomics, so results are the same in every run.
#pragma once

#include "cuda/launch.cuh"

namespace tf::cuda {

struct ColumnSumArgs {
  Element type;
  const float* partial;  // (sums, shares, columns)
  void* results[2];      // (columns) each; may be null
  int64_t shares, columns;
};

// 8 threads per column; the first of them adds up their sums.
template <class T>
__global__ void __launch_bounds__(256) column_sum_kernel(const ColumnSumArgs args) {
  TF_SHARED(shared);
  float* scratch = reinterpret_cast<float*>(shared);
  T* result = static_cast<T*>(blockIdx.y == 0 ? args.results[0] : args.results[1]);
  if (result == nullptr) return;
  const int lane = threadIdx.x % kWarp, part = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (column < args.columns)
    for (int64_t s = part; s < args.shares; s += 8)
      sum += args.partial[(blockIdx.y * args.shares + s) * args.columns + column];
  scratch[part * kWarp + lane] = sum;
  __syncthreads();
  if (part == 0 && column < args.columns) {
#pragma unroll
    for (int p = 1; p < 8; ++p) sum += scratch[p * kWarp + lane];
    assign(result[column], sum);
  }
}

template <class T>
void column_sums(const ColumnSumArgs& args, Stream stream) {
  const unsigned sums = args.results[1] != nullptr ? 2 : 1;
  launch(column_sum_kernel<T>, dim3(static_cast<unsigned>(ceil_div(args.columns, kWarp)), sums),
         256, 8 * kWarp * sizeof(float), stream, args);
}

}  // namespace tf::cuda
