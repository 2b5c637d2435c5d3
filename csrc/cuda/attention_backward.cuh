// The backward of attention.cuh.
//
// With K' = keep / (1 - p), dW the gradient of the returned weights (usually absent), and all
// products elementwise unless written with @:
//
//   dP = K' (dO @ V^T + dW),   delta = rowsum(P dP)
//   dS = P (dP - delta),   dQ = scale dS @ K,   dK = scale dS^T @ Q,   dV = (P K')^T @ dO
//
// One kernel has 64 queries per block and computes delta, dQ and the gradient of the mask. A second
// one has 64 keys per block and computes dK and dV, over all query heads that share the keys. Both
// recompute P. No atomics, so results are the same in every run.
//
// delta is computed from the same dP that it is subtracted from, not from the rounded output: if
// one key has almost all the weight of a row, dP - delta cancels. So the first kernel loops twice
// over the keys, unless they fit in one tile.
#pragma once

#include "cuda/attention.cuh"

namespace tf::cuda {

struct AttentionBackwardArgs {
  AttentionArgs call;
  HeadsView grad;
  const void* grad_weights;  // (batch, heads, queries, keys) contiguous; may be null
  HeadsView grad_query, grad_key, grad_value;  // written; data may be null
  float* delta;            // (batch, heads, queries), written by the first kernel
  void* grad_scores;       // dS, (batch, heads, queries, keys) contiguous; may be null
  bool grad_scores_float;  // grad_scores is fp32; else it has the type of the query
};

// Returns the share of a row: the weights are exp(score - row_max) share.
TF_DEVICE float share_of(float row_sum) { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; }

// Returns the gradient of a returned weight, 0 if there is none.
template <class T>
TF_DEVICE float grad_weight(const AttentionBackwardArgs& args, const AttentionHead<T>& head,
                            int query, int key) {
  if (args.grad_weights == nullptr || query >= args.call.queries || key >= args.call.keys)
    return 0.0f;
  const int64_t at = (head.first_row + query) * args.call.keys + key;
  return to_float(static_cast<const T*>(args.grad_weights)[at]);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 2)
    attention_backward_query_kernel(const AttentionBackwardArgs backward) {
  using T = typename Tile::Type;
  const AttentionArgs& args = backward.call;
  TF_SHARED(shared);
  unsigned char* queries = shared;
  unsigned char* grads = queries + Tile::own_bytes;
  unsigned char* keys = grads + Tile::own_bytes;  // two tiles, and two of values
  unsigned char* values = keys + 2 * Tile::bytes;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const AttentionBlock block(args.queries, Tile::own, args.heads, args.causal);
  const AttentionHead<T> head(args, block.batch, block.head);
  const int row = block.first + threadIdx.x / kWarp * 16;
  const bool idle = row >= args.queries;
  const T* query = head_of<T>(args.query, block.batch, block.head);
  const T* grad = head_of<T>(backward.grad, block.batch, block.head);
  const T* key = head_of<T>(args.key, block.batch, block.head / args.group);
  const T* value = head_of<T>(args.value, block.batch, block.head / args.group);

  const int tiles = key_tiles<Tile>(head, block.first + Tile::own, backward.grad_scores != nullptr);
  const int steps = tiles == 1 ? 1 : 2 * tiles;
  const auto load_step = [&](int step) {
    const int first = (step < tiles ? step : step - tiles) * Tile::rows;
    const auto exists = [&](int row) { return row < head.end; };
    load_rows<Tile, Tile::rows>(keys + step % 2 * Tile::bytes, args.key, key, first, exists);
    load_rows<Tile, Tile::rows>(values + step % 2 * Tile::bytes, args.value, value, first, exists);
  };
  const auto exists = [&](int row) { return row < args.queries; };
  load_rows<Tile, Tile::own>(queries, args.query, query, block.first, exists);
  load_rows<Tile, Tile::own>(grads, backward.grad, grad, block.first, exists);
  if (steps > 0) load_step(0);
  cp_async_commit();

  float sums[Tile::sums][4] = {}, row_max[2] = {}, share[2] = {}, delta[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (row + g + 8 * i < args.queries) {
      row_max[i] = args.row_max[head.first_row + row + g + 8 * i];
      share[i] = share_of(args.row_sum[head.first_row + row + g + 8 * i]);
    }
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_step(step + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // the copies of all threads are complete
    if (!idle) {
      const int first = (step < tiles ? step : step - tiles) * Tile::rows;
      float p[Tile::scores][4] = {}, dp[Tile::scores][4] = {};
      multiply<Tile>(p, queries, keys + step % 2 * Tile::bytes);
      multiply<Tile>(dp, grads, values + step % 2 * Tile::bytes);
      head.template to_scores<false>(p, row, first);
      if (backward.grad_weights != nullptr)
#pragma unroll
        for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            dp[n][i] +=
                grad_weight<T>(backward, head, row + g + i / 2 * 8, first + 8 * n + 2 * t + i % 2);
      if (args.dropout.on)
        head.template each_factor<false, Tile::scores>(
            row, first, [&](int n, int i, float factor) { dp[n][i] = drop(dp[n][i], factor); });
#pragma unroll
      for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Gradients of masked-out weights may be NaN.
          if (p[n][i] == -INFINITY) dp[n][i] = 0.0f;
          p[n][i] = head.weight_of_saved(p[n][i], row_max[i / 2], share[i / 2]);
        }
      if (step < tiles) {
#pragma unroll
        for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) delta[i / 2] += p[n][i] * dp[n][i];
        if (step == tiles - 1) {
          delta[0] = reduce_row(delta[0], Add{});
          delta[1] = reduce_row(delta[1], Add{});
        }
      }
      if (step == steps - 1 || step >= tiles) {
#pragma unroll
        for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[n][i] *= dp[n][i] - delta[i / 2];
        const auto store_scores = [&](auto* to) {
#pragma unroll
          for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int at = row + g + i / 2 * 8, column = first + 8 * n + 2 * t + i % 2;
              if (at < args.queries && column < args.keys)
                assign(to[(head.first_row + at) * args.keys + column], p[n][i]);
            }
        };
        if (backward.grad_scores != nullptr) {
          if (backward.grad_scores_float)
            store_scores(static_cast<float*>(backward.grad_scores));
          else
            store_scores(static_cast<T*>(backward.grad_scores));
        }
        accumulate<Tile>(sums, p, keys + step % 2 * Tile::bytes);
      }
    }
    __syncthreads();  // all threads have read the tiles that the next step overwrites
  }
  cp_async_wait<0>();  // a block that ran no step has copies in flight
  if (idle) return;

#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (t == 0 && row + g + 8 * i < args.queries)
      backward.delta[head.first_row + row + g + 8 * i] = delta[i];
  if (backward.grad_query.data == nullptr) return;
  const float factors[2] = {args.scale, args.scale};
  store_sums<Tile>(backward.grad_query, block.batch, block.head, row, args.queries, sums, factors);
  // Keys beyond the end were loaded as 0. So a product of NaN or inf with a probability of 0 comes
  // only from keys that a mask or causality hides. Rows with such a sum are computed again without
  // these keys.
  uint32_t again = 0;
  if (args.causal || args.mask_type != MaskType::none) again = rows_not_finite(sums);
  if (again != 0) __syncwarp();  // other lanes stored the first result
  for (int r = 0; again != 0; ++r, again >>= 1) {
    const float highest = of_row(row_max[0], row_max[1], r),
                inverse = of_row(share[0], share[1], r), sum = of_row(delta[0], delta[1], r);
    const int at = row + r;
    if ((again & 1) == 0 || at >= args.queries) continue;
    float exact[Tile::head / kWarp] = {};
    for (int s = 0; s < head.end; ++s) {
      const T* key_row = key + s * args.key.row;
      const float score = head.score_of(query + at * args.query.row, key_row, at, s);
      if (score == -INFINITY) continue;
      const float dp = head.dot(backward.grad, grad + at * backward.grad.row, args.value,
                                value + s * args.value.row) +
                       grad_weight<T>(backward, head, at, s);
      const float ds =
          head.weight_of_saved(score, highest, inverse) * (drop(dp, head.factor_of(at, s)) - sum);
#pragma unroll
      for (int j = 0; j < Tile::head / kWarp; ++j) {
        const int column = lane + j * kWarp;
        if (column < args.key.size) exact[j] += ds * to_float(key_row[column * args.key.column]);
      }
    }
    T* to = const_cast<T*>(head_of<T>(backward.grad_query, block.batch, block.head)) +
            at * backward.grad_query.row;
#pragma unroll
    for (int j = 0; j < Tile::head / kWarp; ++j)
      if (lane + j * kWarp < args.key.size) assign(to[lane + j * kWarp], exact[j] * args.scale);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 2)
    attention_backward_key_kernel(const AttentionBackwardArgs backward) {
  using T = typename Tile::Type;
  const AttentionArgs& args = backward.call;
  TF_SHARED(shared);
  unsigned char* keys = shared;
  unsigned char* values = keys + Tile::own_bytes;
  unsigned char* queries = values + Tile::own_bytes;  // two tiles, and two of grads
  unsigned char* grads = queries + 2 * Tile::bytes;
  // row_max, share and delta of the queries of three tiles. They are read one tile ahead of the
  // queries, because fully masked queries are not copied.
  float* statistics = reinterpret_cast<float*>(grads + 2 * Tile::bytes);
  const int lane = threadIdx.x % kWarp, t = lane % 4;
  const AttentionBlock block(args.keys, Tile::own, args.heads / args.group, false);
  const int first_head = block.head * args.group;
  const int row = block.first + threadIdx.x / kWarp * 16;  // the warp's first key
  const int end = AttentionHead<T>(args, block.batch, first_head).end;
  const bool idle = row >= end;
  const T* key = head_of<T>(args.key, block.batch, block.head);
  const T* value = head_of<T>(args.value, block.batch, block.head);

  // Number of query tiles that attend to some of the keys.
  const int skipped = args.causal ? block.first / Tile::rows : 0;
  int tiles = (args.queries + Tile::rows - 1) / Tile::rows - skipped;
  if (tiles < 0 || block.first >= end) tiles = 0;
  const int steps = tiles * args.group;
  static_assert(Tile::rows <= Tile::threads);
  const auto read_statistics = [&](int step, float (&to)[3]) {
    const int row = (skipped + step % tiles) * Tile::rows + static_cast<int>(threadIdx.x);
    const bool inside = step < steps && threadIdx.x < Tile::rows && row < args.queries;
    const int64_t head = int64_t{block.batch} * args.heads + first_head + step / tiles;
    const int64_t at = inside ? head * args.queries + row : 0;
    to[0] = inside ? args.row_max[at] : 0.0f;
    to[1] = inside ? args.row_sum[at] : 0.0f;
    to[2] = inside ? backward.delta[at] : 0.0f;
  };
  const auto keep_statistics = [&](int step, const float (&found)[3]) {
    if (threadIdx.x >= Tile::rows) return;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      statistics[(step % 3 * 3 + i) * Tile::rows + threadIdx.x] =
          i == 1 ? share_of(found[i]) : found[i];
  };
  const auto load_step = [&](int step) {
    const AttentionHead<T> head(args, block.batch, first_head + step / tiles);
    const int first = (skipped + step % tiles) * Tile::rows;
    // Fully masked queries may be NaN or inf, so they are loaded as 0.
    const float* shares = statistics + (step % 3 * 3 + 1) * Tile::rows;
    const auto sees = [&](int row) { return shares[row - first] != 0.0f; };
    load_rows<Tile, Tile::rows>(queries + step % 2 * Tile::bytes, args.query,
                                head_of<T>(args.query, block.batch, head.head), first, sees);
    load_rows<Tile, Tile::rows>(grads + step % 2 * Tile::bytes, backward.grad,
                                head_of<T>(backward.grad, block.batch, head.head), first, sees);
  };
  const auto exists = [&](int row) { return row < end; };
  load_rows<Tile, Tile::own>(keys, args.key, key, block.first, exists);
  load_rows<Tile, Tile::own>(values, args.value, value, block.first, exists);
  float ahead[3];
  for (int step = 0; step < 2 && step < steps; ++step) {
    read_statistics(step, ahead);
    keep_statistics(step, ahead);
  }
  __syncthreads();  // all threads have stored their statistics
  if (steps > 0) load_step(0);
  cp_async_commit();

  float key_sums[Tile::sums][4] = {}, value_sums[Tile::sums][4] = {};
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_step(step + 1);
    cp_async_commit();
    read_statistics(step + 2, ahead);
    cp_async_wait<1>();
    __syncthreads();  // the copies of all threads are complete
    if (!idle) {
      const AttentionHead<T> head(args, block.batch, first_head + step / tiles);
      const int first = (skipped + step % tiles) * Tile::rows;
      const float* statistic = statistics + step % 3 * 3 * Tile::rows + 2 * t;
      float p[Tile::scores][4] = {}, dp[Tile::scores][4] = {};
      multiply<Tile>(p, keys, queries + step % 2 * Tile::bytes);
      multiply<Tile>(dp, values, grads + step % 2 * Tile::bytes);
      head.template to_scores<true>(p, row, first);
      if (backward.grad_weights != nullptr)
#pragma unroll
        for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            dp[n][i] += grad_weight<T>(backward, head, first + 8 * n + 2 * t + i % 2,
                                       row + lane / 4 + i / 2 * 8);
      // p becomes the factor of the values (with dropout), and dp the gradient of the scores.
      const auto finish = [&](int n, int i, float factor) {
        const int at = 8 * n + i % 2;
        const bool hidden = p[n][i] == -INFINITY;
        const float weight =
            head.weight_of_saved(p[n][i], statistic[at], statistic[Tile::rows + at]);
        dp[n][i] =
            hidden ? 0.0f : weight * (drop(dp[n][i], factor) - statistic[2 * Tile::rows + at]);
        p[n][i] = drop(weight, factor);
      };
      if (args.dropout.on) {
        head.template each_factor<true, Tile::scores>(row, first, finish);
      } else {
#pragma unroll
        for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) finish(n, i, 1.0f);
      }
      accumulate<Tile>(value_sums, p, grads + step % 2 * Tile::bytes);
      accumulate<Tile>(key_sums, dp, queries + step % 2 * Tile::bytes);
    }
    keep_statistics(step + 2, ahead);
    __syncthreads();  // all threads have read the tiles that the next step overwrites
  }
  cp_async_wait<0>();  // a block that ran no step has copies in flight
  const float scale[2] = {args.scale, args.scale}, one[2] = {1.0f, 1.0f};
  if (backward.grad_key.data != nullptr)
    store_sums<Tile>(backward.grad_key, block.batch, block.head, row, args.keys, key_sums, scale);
  if (backward.grad_value.data != nullptr)
    store_sums<Tile>(backward.grad_value, block.batch, block.head, row, args.keys, value_sums, one);
}

template <class T, int kHead>
void launch_attention_backward_as(const AttentionBackwardArgs& backward, Stream stream) {
  // Larger tiles would need too many registers for two blocks per multiprocessor, and in fp32 they
  // would not fit in 99 KiB of shared memory.
  using QueryTile = AttentionTile<T, kHead, sizeof(T) == 4 && kHead == 128 ? 16 : 32>;
  using KeyTile = AttentionTile<T, kHead, kHead == 128 ? 16 : 32>;
  const AttentionArgs& args = backward.call;
  const int64_t queries = attention_blocks(args, args.queries, args.heads, QueryTile::own);
  const int64_t keys = attention_blocks(args, args.keys, args.heads / args.group, KeyTile::own);
  if (queries > 0)
    launch(attention_backward_query_kernel<QueryTile>, dim3(static_cast<unsigned>(queries)),
           QueryTile::threads, 2 * QueryTile::own_bytes + 4 * QueryTile::bytes, stream, backward);
  if (keys > 0 && (backward.grad_key.data != nullptr || backward.grad_value.data != nullptr))
    launch(attention_backward_key_kernel<KeyTile>, dim3(static_cast<unsigned>(keys)),
           KeyTile::threads,
           2 * KeyTile::own_bytes + 4 * KeyTile::bytes + 9 * KeyTile::rows * sizeof(float), stream,
           backward);
}

inline void launch_attention_backward(const AttentionBackwardArgs& backward, Stream stream) {
  by_head(backward.call.type, larger_head(backward.call),
          [&]<class T, int kHead>() { launch_attention_backward_as<T, kHead>(backward, stream); });
}

}  // namespace tf::cuda
