// Scaled dot-product attention: tiles in shared memory, and the forward.
//
//   output = dropout(softmax(scale Q K^T + mask)) V
//
// A block of four warps has 64 queries of one head and loops over tiles of keys with the online
// softmax. Each warp has 16 queries, with scores and sums in the fragments of m16n8k16. bf16 and
// fp16 use mma.sync, fp32 uses FMA in the same fragments. Tiles are loaded by cp.async, one tile
// ahead of the computation. The 16-byte chunks of their rows are swizzled so that ldmatrix has no
// bank conflicts.
//
// The maximum and the sum of each row are saved for backward, of scores with their scale:
// P = exp(score - row_max) / row_sum. Both are 0 for a fully masked row, and its results are 0.
//
// Masked-out keys and values may be NaN or inf. Masked-out scores are replaced, so the keys have no
// effect, but values would give 0 * NaN. Rows whose result is not finite are recomputed from
// visible keys only.
#pragma once

#include "cuda/launch.cuh"

namespace tf::cuda {

// A tensor (batch, heads, rows, size) with strides in elements.
struct HeadsView {
  const void* data;
  int64_t batch, head, row, column;
  int size;
  bool wide;  // rows consist of aligned chunks of 16 bytes
};

enum class MaskType { none, boolean, float32, like_query };

struct AttentionArgs {
  Element type;
  HeadsView query, key, value;
  MaskType mask_type;
  const void* mask;  // (batch, heads, queries, keys), with the strides below, in bytes
  int64_t mask_batch, mask_head, mask_row, mask_column;
  const void* lengths;  // (batch) int32 or int64; may be null
  int64_t length_stride;
  bool long_lengths;
  int batch, heads, group, queries, keys;  // group: query heads that share a key head
  bool causal;
  // False: scores are products of queries and keys, and `exponent`, the factor in exp2, includes
  // the scale. True, for additive masks and scales that are not positive: scores are products times
  // `scale` plus the mask.
  bool scaled;
  float scale, exponent;
  Dropout dropout;
  float *row_max, *row_sum;  // (batch, heads, queries)

  // The factor that is missing from the kernel's scores; 1 if they are scaled.
  TF_DEVICE float unscaled_by() const { return scaled ? 1.0f : scale; }
};

struct AttentionForwardArgs {
  AttentionArgs call;
  HeadsView output;  // written
  void* weights;     // (batch, heads, queries, keys) contiguous; may be null
};

// Sizes of tiles. Rows have kHead elements of T, with zeros beyond the tensor's size. A block has
// `own` rows of one side (queries or keys) and loops over tiles of kRows of the other.
template <class T, int kHead, int kRows>
struct AttentionTile {
  using Type = T;
  static constexpr bool lowp = sizeof(T) == 2;  // bf16 or fp16
  static constexpr int head = kHead, rows = kRows, own = 64, threads = 2 * own;
  static constexpr int vector = 16 / sizeof(T), chunks = kHead / vector;
  static constexpr int own_bytes = own * kHead * sizeof(T), bytes = kRows * kHead * sizeof(T);
  static constexpr int scores = kRows / 8, sums = kHead / 8;  // fragments of 16 rows

  // Returns the offset of a chunk of 16 bytes. The same chunk of eight consecutive rows is in eight
  // different groups of banks.
  TF_DEVICE static int swizzled(int row, int chunk) {
    constexpr int kSpan = chunks < 8 ? 8 / chunks : 1;  // rows in the 128 bytes of all banks
    constexpr int kMask = (chunks < 8 ? chunks : 8) - 1;
    return (row * chunks + (chunk ^ (row / kSpan & kMask))) * 16;
  }
};

template <class T>
TF_DEVICE const T* head_of(const HeadsView& view, int batch, int head) {
  return static_cast<const T*>(view.data) + batch * view.batch + head * view.head;
}

// Copies kRows rows of one head, from `first` on, to shared memory; complete after cp_async_wait.
// Rows for which `valid(row)` is false are zero.
template <class Tile, int kRows, class Valid>
TF_DEVICE void load_rows(unsigned char* to, const HeadsView& view, const typename Tile::Type* from,
                         int first, const Valid& valid) {
  using T = typename Tile::Type;
  constexpr int kVector = Tile::vector;
  for (int i = threadIdx.x; i < kRows * Tile::chunks; i += Tile::threads) {
    const int row = i / Tile::chunks, chunk = i % Tile::chunks;
    const bool inside = valid(first + row) && chunk * kVector < view.size;
    unsigned char* at = to + Tile::swizzled(row, chunk);
    const T* source =
        from + (inside ? (first + row) * view.row + chunk * kVector * view.column : 0);
    if (view.wide) {
      cp_async_16(at, source, inside);
    } else {
      Vector<T, kVector> found;
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        found.value[j] = inside && chunk * kVector + j < view.size ? source[j * view.column] : T{};
      *reinterpret_cast<Vector<T, kVector>*>(at) = found;
    }
  }
}

// Computes s += a b^T with rows 16 warp ... 16 warp + 15 of a and all kRows rows of b. s has the
// fragment layout of d in m16n8k16: lane 4 g + t has rows g and g + 8, and columns 8 n + 2 t and
// 8 n + 2 t + 1.
template <class Tile>
TF_DEVICE void multiply(float (&s)[Tile::scores][4], const unsigned char* a,
                        const unsigned char* b) {
  using T = typename Tile::Type;
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * 16;
  if constexpr (Tile::lowp) {
#pragma unroll
    for (int k = 0; k < Tile::head / 16; ++k) {
      uint32_t left[4];
      ldmatrix_x4<false>(left, a + Tile::swizzled(row + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int n = 0; n < Tile::rows / 16; ++n) {
        uint32_t right[4];
        ldmatrix_x4<false>(
            right, b + Tile::swizzled(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
        mma(s[2 * n], left, {right[0], right[1]}, T{});
        mma(s[2 * n + 1], left, {right[2], right[3]}, T{});
      }
    }
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int k = 0; k < Tile::chunks; ++k) {
      float left[2][4];
      load(left[0], reinterpret_cast<const T*>(a + Tile::swizzled(row + g, k)));
      load(left[1], reinterpret_cast<const T*>(a + Tile::swizzled(row + g + 8, k)));
#pragma unroll
      for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float right[4];
          load(right, reinterpret_cast<const T*>(b + Tile::swizzled(8 * n + 2 * t + e, k)));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += left[i][j] * right[j];
            s[n][2 * i + e] += sum;
          }
        }
    }
  }
}

// Computes sums += p b with 16 rows of fragments p, rounded to T, and kRows rows of b.
template <class Tile>
TF_DEVICE void accumulate(float (&sums)[Tile::sums][4], const float (&p)[Tile::scores][4],
                          const unsigned char* b) {
  using T = typename Tile::Type;
  const int lane = threadIdx.x % kWarp;
  if constexpr (Tile::lowp) {
#pragma unroll
    for (int k = 0; k < Tile::rows / 16; ++k) {
      const float (&low)[4] = p[2 * k], (&high)[4] = p[2 * k + 1];
      const uint32_t left[4] = {pack(T{}, low[0], low[1]), pack(T{}, low[2], low[3]),
                                pack(T{}, high[0], high[1]), pack(T{}, high[2], high[3])};
#pragma unroll
      for (int n = 0; n < Tile::head / 16; ++n) {
        uint32_t right[4];
        ldmatrix_x4<true>(right, b + Tile::swizzled(16 * k + lane % 16, 2 * n + lane / 16));
        mma(sums[2 * n], left, {right[0], right[1]}, T{});
        mma(sums[2 * n + 1], left, {right[2], right[3]}, T{});
      }
    }
  } else {
    const int t = lane % 4;
#pragma unroll
    for (int k = 0; k < Tile::scores; ++k)
#pragma unroll 1
      for (int owner = 0; owner < 4; ++owner)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float upper = __shfl_sync(kAllLanes, p[k][e], (lane & ~3) + owner);
          const float lower = __shfl_sync(kAllLanes, p[k][2 + e], (lane & ~3) + owner);
          const int row = 8 * k + 2 * owner + e;
#pragma unroll
          for (int n = 0; n < Tile::sums; ++n) {
            float right[2];
            load(right,
                 reinterpret_cast<const T*>(b + Tile::swizzled(row, 2 * n + t / 2)) + t % 2 * 2);
            sums[n][0] += upper * right[0], sums[n][1] += upper * right[1];
            sums[n][2] += lower * right[0], sums[n][3] += lower * right[1];
          }
        }
  }
}

// Reduces over the four lanes that share rows of a fragment.
template <class Combine>
TF_DEVICE float reduce_row(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(kAllLanes, x, 1));
  return combine(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Returns the value of row r (of 16) on all lanes: its `upper` for r < 8, else its `lower`.
TF_DEVICE float of_row(float upper, float lower, int r) {
  return __shfl_sync(kAllLanes, r < 8 ? upper : lower, r % 8 * 4);
}

// Masking and dropout of one (batch, head). kPlain: there is neither mask nor dropout.
template <class T, bool kPlain = false>
struct AttentionHead {
  const AttentionArgs& args;
  int batch, head, end;  // keys at positions >= end are masked out
  int64_t first_row;     // first row of the head in row_max, row_sum and the dropout pattern
  const unsigned char* mask;

  TF_DEVICE AttentionHead(const AttentionArgs& args, int batch, int head)
      : args(args),
        batch(batch),
        head(head),
        end(args.keys),
        first_row((static_cast<int64_t>(batch) * args.heads + head) * args.queries),
        mask(static_cast<const unsigned char*>(args.mask) + batch * args.mask_batch +
             head * args.mask_head) {
    if (args.lengths == nullptr) return;
    const int64_t at = batch * args.length_stride;
    const int64_t length = args.long_lengths ? static_cast<const int64_t*>(args.lengths)[at]
                                             : static_cast<const int*>(args.lengths)[at];
    end = length < 0 ? 0 : length < end ? static_cast<int>(length) : end;
  }

  // Returns -inf for a masked-out score, else the value of an additive mask, or 0. Mask elements of
  // scores that lengths or causality mask out are not read.
  template <MaskType kMask>
  TF_DEVICE float added(int query, int key) const {
    const bool hidden = (key >= end) | (query >= args.queries) | (args.causal & (key > query));
    if constexpr (kMask == MaskType::none) return hidden ? -INFINITY : 0.0f;
    const unsigned char* at = mask + (hidden ? 0 : query * args.mask_row + key * args.mask_column);
    float found;
    if constexpr (kMask == MaskType::boolean)
      found = *at != 0 ? 0.0f : -INFINITY;
    else if constexpr (kMask == MaskType::float32)
      found = *reinterpret_cast<const float*>(at);
    else
      found = to_float(*reinterpret_cast<const T*>(at));
    return hidden ? -INFINITY : found;
  }

  // Calls f.template operator()<mask type>().
  template <class F>
  TF_DEVICE void by_mask(const F& f) const {
    if (kPlain || args.mask_type == MaskType::none) return f.template operator()<MaskType::none>();
    if constexpr (!kPlain) {
      if (args.mask_type == MaskType::boolean) return f.template operator()<MaskType::boolean>();
      if (args.mask_type == MaskType::float32) return f.template operator()<MaskType::float32>();
      if constexpr (sizeof(T) == 2) f.template operator()<MaskType::like_query>();
    }
  }

  // Converts the products of a fragment to scores, -inf where masked out. Rows are queries, or keys
  // with kTransposed.
  template <bool kTransposed, int kCount>
  TF_DEVICE void to_scores(float (&s)[kCount][4], int row, int column) const {
    const int lane = threadIdx.x % kWarp;
    const int query = kTransposed ? column : row, key = kTransposed ? row : column;
    constexpr int kQueries = kTransposed ? 8 * kCount : 16, kKeys = kTransposed ? 16 : 8 * kCount;
    const bool all = (kPlain || args.mask_type == MaskType::none) && key + kKeys <= end &&
                     query + kQueries <= args.queries && (!args.causal || key + kKeys - 1 <= query);
    if (all && !args.scaled) return;
    const float scale = args.scaled ? args.scale : 1.0f;
    by_mask([&]<MaskType kMask>() {
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int down = row + lane / 4 + i / 2 * 8;
          const int across = column + 8 * n + lane % 4 * 2 + i % 2;
          const float more = kTransposed ? added<kMask>(across, down) : added<kMask>(down, across);
          s[n][i] = more == -INFINITY ? -INFINITY : s[n][i] * scale + more;
        }
    });
  }

  // Calls f(n, i, factor) with the dropout factor of each weight of a fragment. One Philox call
  // serves eight keys of a query; one lane makes it and shares the bits with the others.
  template <bool kTransposed, int kCount, class F>
  TF_DEVICE void each_factor(int row, int column, const F& f) const {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    // Lane t of a row draws for keys 8 t ... 8 t + 7 (of 32 keys, or of 16). With kTransposed, lane
    // 2 q + h draws for keys 8 h ... 8 h + 7 of query q (of 16).
    constexpr int kEights = kCount < 4 ? kCount : 4;
    constexpr int kCalls = kTransposed ? kCount / 2 : kCount / kEights * 2;
    uint32_t bits[kCalls];
    const uint64_t seed = seed_of(args.dropout);
    // The loop is not unrolled, so the results are shifted through the registers.
#pragma unroll 1
    for (int call = 0; call < kCalls; ++call) {
#pragma unroll
      for (int i = 0; i + 1 < kCalls; ++i) bits[i] = bits[i + 1];
      const int query = kTransposed ? column + 16 * call + lane / 2 : row + g + call % 2 * 8;
      const int key =
          kTransposed ? row + lane % 2 * 8 : column + 8 * (call / 2 * kEights + t % kEights);
      uint32_t found = keep_bits(args.dropout, seed, first_row + query, key / 8);
      if constexpr (!kTransposed) {
        found <<= 8 * (t % kEights);
        found |= __shfl_xor_sync(kAllLanes, found, 1);
        if constexpr (kEights == 4) found |= __shfl_xor_sync(kAllLanes, found, 2);
      }
      bits[kCalls - 1] = found;
    }
    const auto factor = [&](uint32_t word, int at) {
      return word >> at & 1 ? args.dropout.scale : 0.0f;
    };
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kTransposed) {
          const int query = n % 2 * 8 + 2 * t + i % 2;
          f(n, i, factor(__shfl_sync(kAllLanes, bits[n / 2], 2 * query + i / 2), g));
        } else {
          f(n, i, factor(bits[n / kEights * 2 + i / 2], 8 * (n % kEights) + 2 * t + i % 2));
        }
      }
  }

  TF_DEVICE float weight(float score, float row_max, float share) const {
    return exp2_approx((score - row_max) * args.exponent) * share;
  }

  // The same with a saved row_max. The product is rounded, as row_max was; otherwise large scores
  // would exceed their own maximum.
  TF_DEVICE float weight_of_saved(float score, float row_max, float share) const {
    constexpr float kLog2E = 1.44269504f;
    return exp2_approx((rounded_product(score, args.unscaled_by()) - row_max) * kLog2E) * share;
  }

  // Returns one score, computed by a whole warp, for the few rows that are recomputed.
  TF_DEVICE float score_of(const T* query_row, const T* key_row, int query, int key) const {
    float more = 0.0f;
    by_mask([&]<MaskType kMask>() { more = added<kMask>(query, key); });
    if (more == -INFINITY) return more;
    const float product = dot(args.query, query_row, args.key, key_row);
    return (args.scaled ? product * args.scale : product) + more;
  }
  TF_DEVICE static float dot(const HeadsView& left, const T* a, const HeadsView& right,
                             const T* b) {
    float sum = 0.0f;
    for (int i = threadIdx.x % kWarp; i < left.size; i += kWarp)
      sum += to_float(a[i * left.column]) * to_float(b[i * right.column]);
    return reduce_warp(sum, Add{});
  }
  TF_DEVICE float factor_of(int query, int key) const {
    if (kPlain || !args.dropout.on) return 1.0f;
    float factors[1];
    dropout_factors(args.dropout, first_row + query, key, factors);
    return factors[0];
  }
};

// The (batch, head) of a block, and its first row.
struct AttentionBlock {
  int batch, head, first;
  TF_DEVICE AttentionBlock(int rows, int own, int heads, bool last_first) {
    const int tiles = (rows + own - 1) / own, tile = blockIdx.x % tiles;
    const int pair = blockIdx.x / tiles;
    // With causal the last queries have the most work, so they start first.
    first = (last_first ? tiles - 1 - tile : tile) * own;
    batch = pair / heads, head = pair % heads;
  }
};

// Returns the number of key tiles to loop over for queries before `last`. `all`: all tiles, because
// the results of masked-out keys are written, too.
template <class Tile, bool kPlain>
TF_DEVICE int key_tiles(const AttentionHead<typename Tile::Type, kPlain>& head, int last,
                        bool all) {
  int walk = head.end;
  if (head.args.causal && last < walk) walk = last;
  if (all) walk = head.args.keys;
  return (walk + Tile::rows - 1) / Tile::rows;
}

// Stores fragments of 16 rows, multiplied by `factors`, to rows row ... row + 15 of a head.
template <class Tile>
TF_DEVICE void store_sums(const HeadsView& view, int batch, int head, int row, int limit,
                          const float (&sums)[Tile::sums][4], const float (&factors)[2]) {
  using T = typename Tile::Type;
  const int lane = threadIdx.x % kWarp;
  T* to = const_cast<T*>(head_of<T>(view, batch, head));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = row + lane / 4 + 8 * i;
    if (at >= limit) continue;
#pragma unroll
    for (int n = 0; n < Tile::sums; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float pair[2] = {sums[n][2 * i] * factors[i], sums[n][2 * i + 1] * factors[i]};
      T* place = to + at * view.row + column;
      if (view.wide && column < view.size) {
        store(place, pair);
      } else {
        if (column < view.size) assign(place[0], pair[0]);
        if (column + 1 < view.size) assign(place[1], pair[1]);
      }
    }
  }
}

// Returns a bit mask of the 16 rows of fragments; bit r is set if row r has NaN or inf.
template <int kCount>
TF_DEVICE uint32_t rows_not_finite(const float (&sums)[kCount][4]) {
  const int lane = threadIdx.x % kWarp;
  uint32_t rows = 0;
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(fabsf(sums[n][i]) < INFINITY)) rows |= 1u << (lane / 4 + i / 2 * 8);
  if (!__any_sync(kAllLanes, rows != 0)) return 0;
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) rows |= __shfl_xor_sync(kAllLanes, rows, mask);
  return rows;
}

// kPlain: without mask, dropout and weights; then registers suffice for three blocks per
// multiprocessor, except for heads of 128.
template <class Tile, bool kPlain>
__global__ void __launch_bounds__(Tile::threads, (kPlain && Tile::head < 128) ? 3 : 2)
    attention_kernel(const AttentionForwardArgs forward) {
  using T = typename Tile::Type;
  const AttentionArgs& args = forward.call;
  TF_SHARED(shared);
  unsigned char* queries = shared;
  unsigned char* keys = queries + Tile::own_bytes;  // two tiles, and two of values
  unsigned char* values = keys + 2 * Tile::bytes;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const AttentionBlock block(args.queries, Tile::own, args.heads, args.causal);
  const AttentionHead<T, kPlain> head(args, block.batch, block.head);
  const int row = block.first + threadIdx.x / kWarp * 16;  // the warp's first query
  const bool idle = row >= args.queries;
  const T* query = head_of<T>(args.query, block.batch, block.head);
  const T* key = head_of<T>(args.key, block.batch, block.head / args.group);
  const T* value = head_of<T>(args.value, block.batch, block.head / args.group);

  // With weights there are two loops over the tiles, because weights need the sums of whole rows.
  const bool weighs = !kPlain && forward.weights != nullptr;
  const bool drops = !kPlain && args.dropout.on;
  const int tiles = key_tiles<Tile>(head, block.first + Tile::own, weighs);
  const int steps = weighs ? 2 * tiles : tiles;
  const auto load_step = [&](int step) {
    const int first = (step < tiles ? step : step - tiles) * Tile::rows;
    const auto exists = [&](int row) { return row < head.end; };
    load_rows<Tile, Tile::rows>(keys + step % 2 * Tile::bytes, args.key, key, first, exists);
    if (step < tiles)
      load_rows<Tile, Tile::rows>(values + step % 2 * Tile::bytes, args.value, value, first,
                                  exists);
  };
  load_rows<Tile, Tile::own>(queries, args.query, query, block.first,
                             [&](int row) { return row < args.queries; });
  if (steps > 0) load_step(0);
  cp_async_commit();

  float sums[Tile::sums][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
  float share[2] = {};
  for (int step = 0;; ++step) {
    if (step == tiles && !idle) {
      float factors[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_sum[i] = reduce_row(row_sum[i], Add{});
        if (row_sum[i] == 0.0f) row_max[i] = 0.0f;
        share[i] = row_sum[i] == 0.0f ? 0.0f : 1.0f / row_sum[i];
        factors[i] = drops ? share[i] * args.dropout.scale : share[i];
        const int at = row + g + 8 * i;
        if (t == 0 && at < args.queries) {
          args.row_max[head.first_row + at] = args.unscaled_by() * row_max[i];
          args.row_sum[head.first_row + at] = row_sum[i];
        }
      }
      store_sums<Tile>(forward.output, block.batch, block.head, row, args.queries, sums, factors);
      // Keys beyond the end were loaded as 0. So a product of NaN or inf with a probability of 0
      // comes only from keys that a mask or causality hides. Rows with such a sum are computed
      // again without these keys.
      uint32_t again = 0;
      if (args.causal || (!kPlain && args.mask_type != MaskType::none))
        again = rows_not_finite(sums);
      if (again != 0) __syncwarp();  // other lanes stored the first result
      for (int r = 0; again != 0; ++r, again >>= 1) {
        const float highest = of_row(row_max[0], row_max[1], r),
                    inverse = of_row(share[0], share[1], r);
        if ((again & 1) == 0 || row + r >= args.queries) continue;
        float exact[Tile::head / kWarp] = {};
        for (int s = 0; s < head.end; ++s) {
          const float score =
              head.score_of(query + (row + r) * args.query.row, key + s * args.key.row, row + r, s);
          if (score == -INFINITY) continue;
          const float p = drop(head.weight(score, highest, inverse), head.factor_of(row + r, s));
#pragma unroll
          for (int j = 0; j < Tile::head / kWarp; ++j) {
            const int column = lane + j * kWarp;
            if (column < args.value.size)
              exact[j] += p * to_float(value[s * args.value.row + column * args.value.column]);
          }
        }
        T* to = const_cast<T*>(head_of<T>(forward.output, block.batch, block.head)) +
                (row + r) * forward.output.row;
#pragma unroll
        for (int j = 0; j < Tile::head / kWarp; ++j)
          if (lane + j * kWarp < args.value.size) assign(to[lane + j * kWarp], exact[j]);
      }
    }
    if (step == steps) break;
    if (step + 1 < steps) load_step(step + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // the copies of all threads are complete
    if (!idle) {
      const int first = (step < tiles ? step : step - tiles) * Tile::rows;
      float s[Tile::scores][4] = {};
      multiply<Tile>(s, queries, keys + step % 2 * Tile::bytes);
      head.template to_scores<false>(s, row, first);
      if (step < tiles) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float larger = row_max[i], sum = 0.0f;
#pragma unroll
          for (int n = 0; n < Tile::scores; ++n)
            larger = fmaxf(larger, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
          larger = reduce_row(larger, Maximum{});
          // All scores of the row may be masked out so far: -inf - -inf would be NaN.
          const float base = larger == -INFINITY ? 0.0f : larger;
          const float shrink = exp2_approx((row_max[i] - base) * args.exponent);
#pragma unroll
          for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& p = s[n][2 * i + e];
              p = exp2_approx((p - base) * args.exponent);
              sum += p;
            }
#pragma unroll
          for (int n = 0; n < Tile::sums; ++n)
            sums[n][2 * i] *= shrink, sums[n][2 * i + 1] *= shrink;
          row_sum[i] = row_sum[i] * shrink + sum;
          row_max[i] = larger;
        }
        if (drops)
          head.template each_factor<false, Tile::scores>(row, first,
                                                         [&](int n, int i, float factor) {
                                                           if (factor == 0.0f) s[n][i] = 0.0f;
                                                         });
        accumulate<Tile>(sums, s, values + step % 2 * Tile::bytes);
      } else {
#pragma unroll
        for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][i] = head.weight(s[n][i], row_max[i / 2], share[i / 2]);
        if (drops)
          head.template each_factor<false, Tile::scores>(
              row, first, [&](int n, int i, float factor) { s[n][i] = drop(s[n][i], factor); });
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = row + g + 8 * i;
          if (at >= args.queries) continue;
          T* to = static_cast<T*>(forward.weights) + (head.first_row + at) * args.keys;
#pragma unroll
          for (int n = 0; n < Tile::scores; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = first + 8 * n + 2 * t + e;
              if (column < args.keys) assign(to[column], s[n][2 * i + e]);
            }
        }
      }
    }
    __syncthreads();  // all threads have read the tiles that the next step overwrites
  }
  cp_async_wait<0>();  // a block that ran no step has copies in flight
}

// Calls f.template operator()<T, head>() with the smallest head size of the kernels that fits.
template <class F>
void by_head(Element type, int size, const F& f) {
  by_element(type, [&]<class T>(T) {
    if constexpr (sizeof(T) == 2)
      if (size <= 32) return f.template operator()<T, 32>();
    if (size <= 64) return f.template operator()<T, 64>();
    f.template operator()<T, 128>();
  });
}

constexpr int kLargestHead = 128;

inline int larger_head(const AttentionArgs& args) {
  return args.query.size > args.value.size ? args.query.size : args.value.size;
}

// Number of blocks for all rows of all heads, `own` rows each.
inline int64_t attention_blocks(const AttentionArgs& args, int64_t rows, int64_t heads, int own) {
  return ceil_div(rows, own) * heads * args.batch;
}

template <class T, int kHead>
void launch_attention_as(const AttentionForwardArgs& forward, Stream stream) {
  using Tile = AttentionTile < T, kHead, sizeof(T) == 2 && kHead<128 ? 64 : 32>;
  const AttentionArgs& args = forward.call;
  const int64_t blocks = attention_blocks(args, args.queries, args.heads, Tile::own);
  if (blocks == 0) return;
  const bool plain =
      args.mask_type == MaskType::none && !args.dropout.on && forward.weights == nullptr;
  launch(plain ? attention_kernel<Tile, true> : attention_kernel<Tile, false>,
         dim3(static_cast<unsigned>(blocks)), Tile::threads, Tile::own_bytes + 4 * Tile::bytes,
         stream, forward);
}

inline void launch_attention(const AttentionForwardArgs& forward, Stream stream) {
  by_head(forward.call.type, larger_head(forward.call),
          [&]<class T, int kHead>() { launch_attention_as<T, kHead>(forward, stream); });
}

}  // namespace tf::cuda
