// Scores of a block of queries, panel by panel of keys: scaling, masking, and conversion to
// exponents of 2. For kernel files only.
#pragma once

#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/exp2.h"

namespace tf::TF_ISA {
namespace {

constexpr float kLog2E = 1.44269504089f;

// Exponent of 2 of e^(score + shift); exactly 0 where score = -shift.
TF_INLINE Vec exponent(Vec score, Vec shift) { return (score + shift) * set1(kLog2E); }

// Replaces products by capped scores.
inline void cap_scores(const AttentionShape& shape, float* s, Index count) {
  for (Index j = 0; j < count; j += kLanes) {
    const Vec x = load_n(s + j, min(kLanes, count - j)) * set1(shape.softcap_scale);
    store_some(s + j, set1(shape.softcap) * tanh(x), count - j);
  }
}

constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// One block of queries of one head. `scores[slot]` are the products of a panel, kPanel per row.
class Scores {
 public:
  // `products`: the first slot, `stride` floats before the second.
  Scores(const AttentionShape& call, const BlockMask& mask, float* products, Index stride)
      : shape(call), block_mask(mask), rows(mask.rows), scores(products), slot_stride(stride) {}

 protected:
  struct Panel {
    Index start, count;  // keys; count 0: no panel
    int slot;            // of its scores
    bool unmasked;       // visible to all rows, and the mask adds nothing
    bool direct;         // visible to all rows except for a mask that is read in place
    bool draws = true;   // dropout bits are not cached from the previous panel
  };

  float* row_scores(const Panel& panel, Index i) const {
    return scores + panel.slot * slot_stride + i * kPanel;
  }

  // Number of the block's row i over (B, H, T).
  Index row_of(Index i) const {
    return (block_mask.b * shape.heads + block_mask.head) * shape.queries + block_mask.first + i;
  }

  // The first panel from `start` on that is visible to any row.
  Panel panel_from(Index start, int slot) const {
    for (; start < block_mask.limit; start += kPanel) {
      const Index count = min(kPanel, block_mask.limit - start);
      if (block_mask.fully_masked(start, count)) continue;
      const bool whole = count == kPanel && block_mask.visible(0, start, count) == count;
      const bool direct = whole && shape.mask != nullptr && shape.mask_stride[3] == 1;
      return {start, count, slot, whole && !mask_adds(start, count), direct, true};
    }
    return {start, 0, slot, false, false, true};
  }

  // Whether the mask changes any score of the panel; conservative unless it is broadcast over
  // queries.
  bool mask_adds(Index start, Index count) const {
    if (shape.mask == nullptr) return false;
    if (shape.mask_stride[2] != 0) return true;
    const float* mask = block_mask.mask_row(0, start, count);
    for (Index j = 0; j < count; ++j)
      if (mask[j] != 0.0f) return true;
    return false;
  }

  // The mask of a row of a panel, or nullptr; `shared` if it is broadcast over queries.
  const float* mask_of(const Panel& panel, Index i, const float* shared) const {
    if (shape.mask == nullptr || shared != nullptr) return shared;
    return block_mask.mask_row(i, panel.start, block_mask.visible(i, panel.start, panel.count));
  }

  // Lanes of the u-th vector of a row that causality and length leave visible.
  TF_INLINE Mask in_range(const Panel& panel, Index i, int u) const {
    const Index left = block_mask.visible(i, panel.start, panel.count) - u * kLanes;
    return less(load(kLaneNumbers), set1(static_cast<float>(left)));
  }

  // Scores times scale. Not `*`: the compiler would contract it with a following addition in some
  // places and not in others, and the largest score would differ from the row max.
  TF_INLINE Vec scaled(const float* s) const { return fma(load(s), set1(shape.scale), zero()); }

  // Scores times scale plus the mask.
  TF_INLINE Vec masked(const float* s, Vec mask) const {
    return select(equal(mask, set1(-kInf)), mask, fma(load(s), set1(shape.scale), mask));
  }

  // The kPanel scores of a row, scaled and masked (-inf), and the mask, which includes causality
  // and length.
  TF_INLINE void apply_mask(const Panel& panel, Index i, const float* shared, Vec (&mask)[2],
                            Vec (&x)[2]) const {
    const float* s = row_scores(panel, i);
    if (panel.unmasked) {
      TF_UNROLL for (int u = 0; u < 2; ++u) mask[u] = zero();
    } else if (panel.direct) {
      const char* place = block_mask.mask_at(i, panel.start);
      const Index bytes = element_bytes(shape.mask_type);
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        prefetch_l2(place + (kPanel + u * kLanes) * bytes);
        mask[u] = block_mask.mask_vector(place, u * kLanes);
      }
    } else {
      const float* add = mask_of(panel, i, shared);
      const Index visible = block_mask.visible(i, panel.start, panel.count);
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        const Index left = visible - u * kLanes;
        const Vec here = add != nullptr && left > 0 ? load_some(add + u * kLanes, left) : zero();
        mask[u] = select(in_range(panel, i, u), here, set1(-kInf));
      }
    }
    TF_UNROLL for (int u = 0; u < 2; ++u) x[u] = masked(s + u * kLanes, mask[u]);
  }

  // The mask of a panel if it is broadcast over queries and not read in place.
  const float* shared_mask(const Panel& panel) const {
    return shape.mask != nullptr && shape.mask_stride[2] == 0 && !panel.direct
               ? block_mask.mask_row(0, panel.start, panel.count)
               : nullptr;
  }

  const AttentionShape& shape;
  const BlockMask block_mask;
  const Index rows;
  float* const scores;
  const Index slot_stride;
};

}  // namespace
}  // namespace tf::TF_ISA
