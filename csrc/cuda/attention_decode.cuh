// Attention of one query per head (decoding), split over the keys.
//
// Each head has one row of scores, and keys and values are read once. So memory bandwidth is the
// limit, and batch x heads rows are too few to occupy the GPU. Therefore the keys of a head are
// divided evenly among `splits` blocks, and a second kernel merges their results in a fixed order.
// The number of splits depends on sizes only; a single split needs no merge.
//
// A group of lanes processes four keys at a time, 16 bytes per lane. It loads all of them and their
// values before it computes, and has a maximum, a sum and an output of its own. Up to four query
// heads that share keys are in one block, if rows consist of chunks of 16 bytes. Masked-out values
// are skipped, so they may be NaN or inf.
#pragma once

#include "cuda/attention.cuh"

namespace tf::cuda {

struct AttentionDecodeArgs {
  AttentionForwardArgs forward;  // without weights and dropout
  int splits;
  // (batch, heads, splits, value size), and (batch, heads, splits) twice; null if splits is 1
  float *sums, *maxima, *totals;
};

// Reads a chunk of a row with any element stride; 0 beyond the end of the row.
template <class T>
TF_DEVICE void read(Chunk<T>& chunk, const HeadsView& view, const T* row, int column) {
  chunk.words = {};
#pragma unroll
  for (int j = 0; j < Chunk<T>::kCount; ++j) {
    if (column + j >= view.size) continue;
    const T found = row[(column + j) * view.column];
    if constexpr (sizeof(T) == 2)
      chunk.words.value[j / 2] |= static_cast<uint32_t>(found.bits) << 16 * (j % 2);
    else
      chunk.words.value[j] = found;
  }
}

TF_DEVICE void store_decoded(const AttentionArgs& args, int64_t row, float largest, float total) {
  args.row_max[row] = total == 0.0f ? 0.0f : args.unscaled_by() * largest;
  args.row_sum[row] = total;
}

constexpr int kDecodeThreads = 128;
constexpr int kDecodeBlocks = 6;  // blocks per multiprocessor, for heads that share no keys
constexpr int kDecodeHeads = 4;   // heads per block, for heads that share keys

template <class T, int kHead, int kHeads, bool kWide>
__global__ void __launch_bounds__(kDecodeThreads, !kWide        ? 1
                                                  : kHeads == 1 ? kDecodeBlocks
                                                                : 3)
    attention_decode_kernel(const AttentionDecodeArgs decode) {
  constexpr int kVector = 16 / sizeof(T), kLanes = kHead / kVector, kKeys = 4;
  constexpr int kGroups = kDecodeThreads / kLanes;
  const AttentionArgs& args = decode.forward.call;
  TF_SHARED(shared);
  float* sums = reinterpret_cast<float*>(shared);  // (groups, head)
  float* maxima = sums + kGroups * kHead;
  float* totals = maxima + kGroups;
  const int shares = (args.group + kHeads - 1) / kHeads;  // blocks for the heads of the same keys
  const int split = blockIdx.x % decode.splits, rest = blockIdx.x / decode.splits;
  const int pair = rest / shares, key_heads = args.heads / args.group;
  const int of_group = rest % shares * kHeads;
  const int count = args.group - of_group < kHeads ? args.group - of_group : kHeads;
  const AttentionHead<T> head(args, pair / key_heads, pair % key_heads * args.group + of_group);
  const int group = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kVector;
  const T* keys = head_of<T>(args.key, head.batch, pair % key_heads);
  const T* values = head_of<T>(args.value, head.batch, pair % key_heads);
  const int each = (head.end + decode.splits - 1) / decode.splits;
  const int first = split * each, last = first + each < head.end ? first + each : head.end;

  float sum[kHeads][kVector] = {}, largest[kHeads], total[kHeads] = {};
  Chunk<T> query[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    largest[h] = -INFINITY;
    const int at = head.head + (h < count ? h : 0);
    read(query[h], args.query, head_of<T>(args.query, head.batch, at), column);
  }
  const T *key_row = keys + (first + group) * args.key.row,
          *value_row = values + (first + group) * args.value.row;
  // All groups of a warp take part in every step; keys beyond the last one are not read.
  for (int key = first + group; key - group < last; key += kKeys * kGroups) {
    float more[kHeads][kKeys];
    head.by_mask([&]<MaskType kMask>() {
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          AttentionHead<T> one = head;
          one.mask += h * args.mask_head;
          const int at = key + i * kGroups;
          more[h][i] = h < count && at < last ? one.template added<kMask>(0, at) : -INFINITY;
        }
    });
    Chunk<T> key_chunk[kKeys] = {}, value_chunk[kKeys] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const bool inside = key + i * kGroups < last;
      if constexpr (kWide) {
        if (inside && column < args.key.size) key_chunk[i].read(key_row + column);
        if (inside && column < args.value.size) value_chunk[i].read(value_row + column);
      } else if (inside) {
        read(key_chunk[i], args.key, key_row, column);
        read(value_chunk[i], args.value, value_row, column);
      }
      key_row += kGroups * args.key.row, value_row += kGroups * args.value.row;
    }
    float score[kHeads][kKeys] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int j = 0; j < kVector; ++j)
#pragma unroll
        for (int h = 0; h < kHeads; ++h) score[h][i] += query[h][j] * key_chunk[i][j];
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2)
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
          score[h][i] += __shfl_xor_sync(kAllLanes, score[h][i], mask);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float larger = largest[h];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const float product = args.scaled ? score[h][i] * args.scale : score[h][i];
        score[h][i] = more[h][i] == -INFINITY ? -INFINITY : product + more[h][i];
        larger = fmaxf(larger, score[h][i]);
      }
      const float base = larger == -INFINITY ? 0.0f : larger;
      const float shrink = exp2_approx((largest[h] - base) * args.exponent);
      largest[h] = larger;
      total[h] *= shrink;
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[h][j] *= shrink;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (more[h][i] == -INFINITY) continue;
        const float p = exp2_approx((score[h][i] - base) * args.exponent);
        total[h] += p;
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[h][j] += p * value_chunk[i][j];
      }
    }
  }

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= count) break;
    if (h > 0) __syncthreads();  // all threads have read the previous head
    store(sums + group * kHead + column, sum[h]);
    if (column == 0) maxima[group] = largest[h], totals[group] = total[h];
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
    const int64_t row = static_cast<int64_t>(head.batch) * args.heads + head.head + h;
    if (decode.splits == 1) {
      if (own == 0) store_decoded(args, row, highest, row_sum);
      T* to = const_cast<T*>(head_of<T>(decode.forward.output, head.batch, head.head + h));
      if (own < args.value.size) assign(to[own], row_sum == 0.0f ? 0.0f : output / row_sum);
    } else {
      const int64_t at = row * decode.splits + split;
      if (own == 0) decode.maxima[at] = highest, decode.totals[at] = row_sum;
      if (own < args.value.size) decode.sums[at * args.value.size + own] = output;
    }
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

inline bool decodes_wide(const AttentionArgs& args) { return args.key.wide && args.value.wide; }

// Number of blocks per split of the keys.
inline int64_t decode_rows(const AttentionArgs& args) {
  const int64_t together = decodes_wide(args) && args.group > 1 ? kDecodeHeads : 1;
  return int64_t{args.batch} * (args.heads / args.group) * ceil_div(args.group, together);
}

// Number of splits: as many as the GPU runs at once, but each has at least 64 keys.
inline int decode_splits(const AttentionArgs& args) {
  const int64_t rows = decode_rows(args);
  const int64_t filling = ceil_div(kDecodeBlocks * multiprocessors(), rows > 0 ? rows : 1);
  const int64_t most = ceil_div(args.keys, 64);
  return static_cast<int>(filling < most ? filling : most > 0 ? most : 1);
}

template <class T, int kHead>
void launch_attention_decode_as(const AttentionDecodeArgs& decode, Stream stream) {
  constexpr int kVector = 16 / sizeof(T), kGroups = kDecodeThreads * kVector / kHead;
  const AttentionArgs& args = decode.forward.call;
  const int64_t rows = int64_t{args.batch} * args.heads;
  if (rows == 0) return;
  const auto kernel = !decodes_wide(args) ? attention_decode_kernel<T, kHead, 1, false>
                      : args.group == 1   ? attention_decode_kernel<T, kHead, 1, true>
                                          : attention_decode_kernel<T, kHead, kDecodeHeads, true>;
  launch(kernel, dim3(static_cast<unsigned>(decode_rows(args) * decode.splits)), kDecodeThreads,
         kGroups * (kHead + 2) * sizeof(float), stream, decode);
  if (decode.splits > 1)
    launch(attention_merge_kernel<T>, dim3(static_cast<unsigned>(rows)), kDecodeThreads, 0, stream,
           decode);
}

inline void launch_attention_decode(const AttentionDecodeArgs& decode, Stream stream) {
  by_head(decode.forward.call.type, larger_head(decode.forward.call),
          [&]<class T, int kHead>() { launch_attention_decode_as<T, kHead>(decode, stream); });
}

}  // namespace tf::cuda
