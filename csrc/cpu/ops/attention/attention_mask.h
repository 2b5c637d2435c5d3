// Masking of a block of queries: causal, by key length, and by the mask tensor. For kernel files
// only.
#pragma once

#include "cpu/gemm/gemm.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/words.h"

namespace tf::TF_ISA {
namespace {

// Whether all of n values of an additive mask, `step` apart, are -inf.
template <class T>
bool all_minus_inf(const T* value, Index step, Index n) {
  Index j = 0;
  if (step == 1) {
    for (; j + kLanes <= n; j += kLanes) {
      const Vec x = load(value + j);
      // NaN is not masked; all its comparisons are false, so test for values that are not -inf.
      if (any(less(set1(-kInf), x)) || any(is_nan(x))) return false;
    }
  }
  for (; j < n; ++j)
    if (load_one(value + j * step) != -kInf) return false;
  return true;
}

// Converts a row of an additive mask to floats.
template <class T>
void widen_row(const T* from, Index step, Index n, float* to) {
  Index j = 0;
  if (step == 1)
    for (; j + kLanes <= n; j += kLanes) store(to + j, load(from + j));
  for (; j < n; ++j) to[j] = load_one(from + j * step);
}

// Mask of a block of queries [first, first + rows) of one head.
struct BlockMask {
  const AttentionShape& shape;
  Index b, head, first, rows;
  Index limit;  // end of the keys visible to any row of the block
  float* bias;  // buffer for one row of the mask over a tile of keys

  // Number of keys of the tile [start, start + count) that are visible to the row by causality and
  // length.
  Index visible(Index row, Index start, Index count) const {
    Index end = limit - start;
    if (shape.causal) end = min(end, first + row + 1 - start);
    return max(0, min(count, end));
  }

  const char* mask_at(Index row, Index s) const {
    const Index offset = b * shape.mask_stride[0] + head * shape.mask_stride[1] +
                         (first + row) * shape.mask_stride[2] + s * shape.mask_stride[3];
    return static_cast<const char*>(shape.mask) + offset * element_bytes(shape.mask_type);
  }

  // Prefetches a panel of the mask, unless it is broadcast. Its rows are a stride apart that
  // hardware does not predict.
  void prefetch(Index start) const {
    if (shape.mask == nullptr || shape.mask_stride[2] == 0 || shape.mask_stride[3] != 1) return;
    const char* place = mask_at(0, start);
    const Index bytes = element_bytes(shape.mask_type);
    for (Index i = 0; i < rows; ++i, place += shape.mask_stride[2] * bytes)
      for (Index j = 0; j < kPanel * bytes; j += kLine) prefetch_l2(place + j);
    asm volatile("");  // GCC removes calls of functions that only prefetch
  }

  // A row whose mask begins at `place`.
  bool row_fully_masked(const char* place, Index row, Index start, Index count) const {
    const Index step = shape.mask_stride[3], n = visible(row, start, count);
    switch (shape.mask_type) {
      case Element::boolean:
        return all_zero(place, step, n);
      case Element::float32:
        return all_minus_inf(reinterpret_cast<const float*>(place), step, n);
      case Element::bfloat16:
        return all_minus_inf(reinterpret_cast<const BFloat16*>(place), step, n);
      default:
        return all_minus_inf(reinterpret_cast<const Float16*>(place), step, n);
    }
  }

  // Whether the mask tensor masks the whole tile for the whole block.
  bool fully_masked(Index start, Index count) const {
    if (shape.mask == nullptr) return false;
    // The last row first: it sees most keys if the mask is causal.
    const char* place = mask_at(rows - 1, start);
    const Index stride = shape.mask_stride[2] * element_bytes(shape.mask_type);
    for (Index i = rows - 1; i >= (stride == 0 ? rows - 1 : 0); --i, place -= stride)
      if (!row_fully_masked(place, i, start, count)) return false;
    return true;
  }

  // Number of keys of the tile up to the last panel that is not fully masked; 0 if there is none.
  Index unmasked(Index start, Index count) const {
    while (count > 0) {
      const Index panel = (count - 1) / kPanel * kPanel;
      if (!fully_masked(start + panel, count - panel)) break;
      count = panel;
    }
    return count;
  }

  // One row of the mask over [start, start + count) as additive floats, -inf where masked.
  const float* mask_row(Index row, Index start, Index count) const {
    const char* place = mask_at(row, start);
    const Index step = shape.mask_stride[3];
    switch (shape.mask_type) {
      case Element::boolean: {
        const auto* bytes = reinterpret_cast<const uint8_t*>(place);
        Index j = 0;
        if (step == 1)
          for (; j + kLanes <= count && count - j >= 16; j += kLanes)
            store(bias + j, select(bytes_nonzero(bytes + j), zero(), set1(-kInf)));
        for (; j < count; ++j) bias[j] = bytes[j * step] != 0 ? 0.0f : -kInf;
        return bias;
      }
      case Element::float32:
        if (step == 1) return reinterpret_cast<const float*>(place);
        widen_row(reinterpret_cast<const float*>(place), step, count, bias);
        return bias;
      case Element::bfloat16:
        widen_row(reinterpret_cast<const BFloat16*>(place), step, count, bias);
        return bias;
      default:
        widen_row(reinterpret_cast<const Float16*>(place), step, count, bias);
        return bias;
    }
  }

  // kLanes adjacent values of the mask, from the j-th after `place` on.
  TF_INLINE Vec mask_vector(const char* place, Index j) const {
    switch (shape.mask_type) {
      case Element::boolean:
        return select(bytes_nonzero(reinterpret_cast<const uint8_t*>(place) + j), zero(),
                      set1(-kInf));
      case Element::float32:
        return load(reinterpret_cast<const float*>(place) + j);
      case Element::bfloat16:
        return load(reinterpret_cast<const BFloat16*>(place) + j);
      default:
        return load(reinterpret_cast<const Float16*>(place) + j);
    }
  }

  // scores * scale + mask for the first `count` of a row, -inf where masked.
  void add_mask(float* scores, const float* mask, Index count) const {
    const Vec scale = set1(shape.scale);
    Index j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      const Vec m = load(mask + j);
      store(scores + j, select(equal(m, set1(-kInf)), m, fma(load(scores + j), scale, m)));
    }
    for (; j < count; ++j) scores[j] = mask[j] == -kInf ? -kInf : scores[j] * shape.scale + mask[j];
  }

  // The mask over [start, start + count) if it is the same for all rows; null if it is not.
  const float* shared_row(Index start, Index count) const {
    return shape.mask != nullptr && shape.mask_stride[2] == 0 ? mask_row(0, start, count) : nullptr;
  }

  // Masks a row of scores of the tile [start, start + count): -inf where masked, and behind the
  // visible keys up to `padded`. Applies the scale if there is a mask tensor or `scaled`.
  void mask_scores(float* scores, Index row, Index start, Index count, Index padded,
                   const float* shared, bool scaled) const {
    const Index n = visible(row, start, count);
    if (shape.mask != nullptr) {
      add_mask(scores, shared != nullptr ? shared : mask_row(row, start, n), n);
    } else if (scaled) {
      for (Index j = 0; j < n; ++j) scores[j] *= shape.scale;
    }
    for (Index j = n; j < padded; ++j) scores[j] = -kInf;
  }
};

// End of the keys of a batch element that its length leaves visible.
inline Index key_limit(const AttentionShape& shape, Index b) {
  const Index keys = key_count(shape, b);
  return shape.key_lengths == nullptr ? keys : max(0, min(keys, shape.key_lengths[b]));
}

// Offset of the first row of a head of a batch element.
TF_INLINE Index head_offset(const int64_t* starts, const Index* stride, Index b, Index head) {
  return (starts != nullptr ? starts[b] * stride[2] : b * stride[0]) + head * stride[1];
}
// Address of a row of one head.
template <class T>
TF_INLINE const T* row_at(const void* tensor, const int64_t* starts, const Index* stride, Index b,
                          Index head, Index row) {
  return static_cast<const T*>(tensor) + head_offset(starts, stride, b, head) + row * stride[2];
}
template <class T>
TF_INLINE T* row_at(void* tensor, const int64_t* starts, const Index* stride, Index b, Index head,
                    Index row) {
  return const_cast<T*>(row_at<T>(static_cast<const void*>(tensor), starts, stride, b, head, row));
}

// Bytes of scratch for see_keys().
inline Index seen_bytes(const AttentionArgs& args) {
  if (args.mask == nullptr || args.mask_stride[2] != 0) return 0;
  return args.keys * (4 + (args.size + args.value_size) * element_bytes(args.type)) + 2 * kLine;
}

// Where the mask is the same for all queries, finds the end of the keys that it leaves visible to
// those of a key head. If it hides many keys before, copies the others, their values and their mask
// to `scratch` and lets `args` refer to these copies. The choice depends on the mask only, so that
// neither threads nor the number of queries change results.
template <class T>
Index see_keys(AttentionArgs& args, Index b, Index key_head, char* scratch) {
  const Index limit = key_limit(args, b), group = args.heads / args.key_heads;
  if (args.mask == nullptr || args.mask_stride[2] != 0 || (args.mask_stride[1] != 0 && group > 1))
    return limit;
  auto* bias = reinterpret_cast<float*>(scratch);
  const BlockMask mask{args, b, key_head * group, 0, 1, limit, bias};
  const float* row = mask.mask_row(0, 0, limit);
  Index count = 0, end = 0;
  for (Index s = 0; s < limit; ++s)
    if (row[s] != -kInf) {
      ++count;
      end = s + 1;
    }
  // Causality, dropout and weights depend on positions. Copies cost some 3 % of a call.
  if (args.causal || args.dropout.on || args.weights != nullptr || args.key_stride[3] != 1 ||
      args.value_stride[3] != 1 || args.size * args.value_size == 0 || 8 * count > 7 * end)
    return end;
  T* keys = reinterpret_cast<T*>(scratch + round_up(4 * args.keys, kLine));
  T* values = keys + args.keys * args.size;
  const T* k =
      static_cast<const T*>(args.key) + head_offset(args.key_starts, args.key_stride, b, key_head);
  const T* v = static_cast<const T*>(args.value) +
               head_offset(args.key_starts, args.value_stride, b, key_head);
  for (Index s = 0, n = 0; s < end; ++s) {
    if (row[s] == -kInf) continue;
    std::memcpy(keys + n * args.size, k + s * args.key_stride[2], args.size * sizeof(T));
    std::memcpy(values + n * args.value_size, v + s * args.value_stride[2],
                args.value_size * sizeof(T));
    bias[n++] = row[s];
  }
  args.key = keys;
  args.value = values;
  args.mask = args.mask_type == Element::boolean ? nullptr : bias;
  args.mask_type = Element::float32;
  args.key_starts = args.key_lengths = nullptr;
  for (int d = 0; d < 4; ++d)
    args.key_stride[d] = args.value_stride[d] = args.mask_stride[d] = d == 3 ? 1 : 0;
  args.key_stride[2] = args.size;
  args.value_stride[2] = args.value_size;
  return args.keys = count;
}

}  // namespace
}  // namespace tf::TF_ISA
