// Attention of one query per head, as decoding has it, split over the keys.
//
// There is one row of work per head and keys and values are read once: memory is the limit, and
// batch x heads rows are too few to fill the machine. So the keys of a head are shared out evenly
// over `splits` blocks, whose number depends on sizes only, and a second kernel merges what they
// found, in a fixed order; with one split there is nothing to merge. A group of lanes has a key at
// a time, 16 bytes a lane, and keeps a maximum, a sum and an output of its own. A hidden value is
// not read, so it may hold anything.
#pragma once

#include "cuda/attention.cuh"

namespace tf::cuda {

struct AttentionDecodeArgs {
  AttentionForwardArgs forward;  // without weights and dropout
  int splits;
  float *sums, *maxima,
      *totals;  // (batch, heads, splits) by value size, 1 and 1; null if one split
};

// A chunk of 16 bytes of a row, 0 beyond its end.
template <int kVector, class T>
TF_DEVICE void load_chunk(float (&to)[kVector], const HeadsView& view, const T* row, int column) {
  if (view.wide && column < view.size) return load(to, row + column);
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    to[j] = column + j < view.size ? to_float(row[(column + j) * view.column]) : 0.0f;
}

TF_DEVICE void store_decoded(const AttentionArgs& args, int64_t row, float largest, float total) {
  args.row_max[row] = total == 0.0f ? 0.0f : largest;
  args.row_sum[row] = total;
}

constexpr int kDecodeThreads = 128;

template <class T, int kHead>
__global__ void __launch_bounds__(kDecodeThreads)
    attention_decode_kernel(const AttentionDecodeArgs decode) {
  constexpr int kVector = 16 / sizeof(T), kLanes = kHead / kVector;
  constexpr int kGroups = kDecodeThreads / kLanes;
  const AttentionArgs& args = decode.forward.call;
  TF_SHARED(shared);
  float* sums = reinterpret_cast<float*>(shared);  // (groups, head)
  float* maxima = sums + kGroups * kHead;
  float* totals = maxima + kGroups;
  const int split = blockIdx.x % decode.splits, pair = blockIdx.x / decode.splits;
  const AttentionHead<T> head(args, pair / args.heads, pair % args.heads);
  const int group = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kVector;
  const T* keys = head_of<T>(args.key, head.batch, head.head / args.group);
  const T* values = head_of<T>(args.value, head.batch, head.head / args.group);
  const int each = (head.end + decode.splits - 1) / decode.splits;
  const int first = split * each, last = first + each < head.end ? first + each : head.end;

  float query[kVector], sum[kVector] = {}, largest = -INFINITY, total = 0.0f;
  load_chunk(query, args.query, head_of<T>(args.query, head.batch, head.head), column);
  // All groups of a warp take part in every step.
  for (int start = first; start < last; start += kGroups) {
    const int key = start + group;
    float more = -INFINITY, product = 0.0f;
    if (key < last)
      head.by_mask([&]<MaskType kMask>() { more = head.template added<kMask>(0, key); });
    if (more != -INFINITY) {
      float found[kVector];
      load_chunk(found, args.key, keys + key * args.key.row, column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) product += query[j] * found[j];
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2)
      product += __shfl_xor_sync(kAllLanes, product, mask);
    if (more == -INFINITY) continue;
    const float score = (args.scaled ? product * args.scale : product) + more;
    const float larger = fmaxf(largest, score), base = larger == -INFINITY ? 0.0f : larger;
    const float shrink = exp2_approx((largest - base) * args.exponent);
    const float p = exp2_approx((score - base) * args.exponent);
    float found[kVector];
    load_chunk(found, args.value, values + key * args.value.row, column);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = sum[j] * shrink + p * found[j];
    total = total * shrink + p;
    largest = larger;
  }
  store(sums + group * kHead + column, sum);
  if (column == 0) maxima[group] = largest, totals[group] = total;
  __syncthreads();

  float highest = -INFINITY;
  for (int g = 0; g < kGroups; ++g) highest = fmaxf(highest, maxima[g]);
  const float base = highest == -INFINITY ? 0.0f : highest;
  float row_sum = 0.0f, output = 0.0f;
  const int own = threadIdx.x;
  for (int g = 0; g < kGroups; ++g) {
    const float factor = exp2_approx((maxima[g] - base) * args.exponent);
    row_sum += totals[g] * factor;
    if (own < kHead) output += sums[g * kHead + own] * factor;
  }
  const int64_t row = blockIdx.x;
  if (decode.splits == 1) {
    if (own == 0) store_decoded(args, row, highest, row_sum);
    T* to = const_cast<T*>(head_of<T>(decode.forward.output, head.batch, head.head));
    if (own < args.value.size) assign(to[own], row_sum == 0.0f ? 0.0f : output / row_sum);
  } else {
    if (own == 0) decode.maxima[row] = highest, decode.totals[row] = row_sum;
    if (own < args.value.size) decode.sums[row * args.value.size + own] = output;
  }
}

template <class T>
__global__ void __launch_bounds__(kDecodeThreads)
    attention_merge_kernel(const AttentionDecodeArgs decode) {
  const AttentionArgs& args = decode.forward.call;
  const int64_t row = blockIdx.x, first = row * decode.splits;
  float highest = -INFINITY;
  for (int s = 0; s < decode.splits; ++s) highest = fmaxf(highest, decode.maxima[first + s]);
  const float base = highest == -INFINITY ? 0.0f : highest;
  float total = 0.0f, output = 0.0f;
  const int own = threadIdx.x;
  for (int s = 0; s < decode.splits; ++s) {
    const float factor = exp2_approx((decode.maxima[first + s] - base) * args.exponent);
    total += decode.totals[first + s] * factor;
    if (own < args.value.size) output += decode.sums[(first + s) * args.value.size + own] * factor;
  }
  if (own == 0) store_decoded(args, row, highest, total);
  const int batch = static_cast<int>(row) / args.heads, head = static_cast<int>(row) % args.heads;
  T* to = const_cast<T*>(head_of<T>(decode.forward.output, batch, head));
  if (own < args.value.size) assign(to[own], total == 0.0f ? 0.0f : output / total);
}

inline bool decodes(const AttentionForwardArgs& forward) {
  return forward.call.queries == 1 && forward.weights == nullptr && !forward.call.dropout.on;
}

// Two blocks for each multiprocessor, if each then has 64 keys.
inline int decode_splits(const AttentionArgs& args) {
  const int64_t pairs = int64_t{args.batch} * args.heads;
  const int64_t filling = ceil_div(2 * multiprocessors(), pairs > 0 ? pairs : 1);
  const int64_t most = ceil_div(args.keys, 64);
  return static_cast<int>(filling < most ? filling : most > 0 ? most : 1);
}

template <class T, int kHead>
void launch_attention_decode_as(const AttentionDecodeArgs& decode, Stream stream) {
  constexpr int kVector = 16 / sizeof(T), kGroups = kDecodeThreads * kVector / kHead;
  const AttentionArgs& args = decode.forward.call;
  const int64_t rows = int64_t{args.batch} * args.heads;
  if (rows == 0) return;
  launch(attention_decode_kernel<T, kHead>, dim3(static_cast<unsigned>(rows * decode.splits)),
         kDecodeThreads, kGroups * (kHead + 2) * sizeof(float), stream, decode);
  if (decode.splits > 1)
    launch(attention_merge_kernel<T>, dim3(static_cast<unsigned>(rows)), kDecodeThreads, 0, stream,
           decode);
}

inline void launch_attention_decode(const AttentionDecodeArgs& decode, Stream stream) {
  by_head(decode.forward.call.type, larger_head(decode.forward.call),
          [&]<class T, int kHead>() { launch_attention_decode_as<T, kHead>(decode, stream); });
}

}  // namespace tf::cuda
