// The scores of a block of queries, panel by panel of keys: which of them are seen, and the
// exponents of 2 that they become. For kernel files only.
#pragma once

#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/exp2.h"

namespace tf::TF_ISA {
namespace {

constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Of one block of queries of one head. `scores[slot]` are the products of a panel, kPanel for a
// row.
class Scores {
 public:
  Scores(const AttentionShape& call, const BlockMask& mask, float* const* products)
      : shape(call), block_mask(mask), rows(mask.rows), scores(products) {}

 protected:
  struct Panel {
    long start, count;  // keys; count 0: there is none
    int slot;           // of its scores
    bool unmasked;      // all rows see all of it, and no mask adds to it
    bool direct;        // all rows see all of it but for a mask whose values can be loaded
    bool draws = true;  // its dropout is not known from the panel before
  };

  // A row of the block among those of all queries.
  long row_of(long i) const {
    return (block_mask.b * shape.heads + block_mask.head) * shape.queries + block_mask.first + i;
  }

  // The first panel from `start` on that any row sees.
  Panel panel_from(long start, int slot) const {
    for (; start < block_mask.limit; start += kPanel) {
      const long count = min(kPanel, block_mask.limit - start);
      if (block_mask.fully_masked(start, count)) continue;
      const bool whole = count == kPanel && block_mask.visible(0, start, count) == count;
      const bool direct = whole && shape.mask != nullptr && shape.mask_stride[3] == 1;
      return {start, count, slot, whole && !mask_adds(start, count), direct, true};
    }
    return {start, 0, slot, false, false, true};
  }

  // Whether the mask changes any score of the panel; only asked of masks that are alike for all
  // rows.
  bool mask_adds(long start, long count) const {
    if (shape.mask == nullptr) return false;
    if (shape.mask_stride[2] != 0) return true;
    const float* mask = block_mask.mask_row(0, start, count);
    for (long j = 0; j < count; ++j)
      if (mask[j] != 0.0f) return true;
    return false;
  }

  // The mask of a row of a panel, or nullptr; `shared` if all rows have that one.
  const float* mask_of(const Panel& panel, long i, const float* shared) const {
    if (shape.mask == nullptr || shared != nullptr) return shared;
    return block_mask.mask_row(i, panel.start, block_mask.visible(i, panel.start, panel.count));
  }

  // -inf where a row of a panel is hidden by causality or length.
  TF_INLINE void mask_out_of_range(const Panel& panel, long i, Vec (&x)[2]) const {
    const long visible = block_mask.visible(i, panel.start, panel.count);
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      const long left = visible - u * kLanes;
      if (left < kLanes)
        x[u] = select(less(load(kLaneNumbers), set1(static_cast<float>(left))), x[u], set1(-kInf));
    }
  }

  // Scores times scale. Not `*`: the compiler would join it with an addition behind it in some
  // places and not in others, and the largest score would not be the very number it is referred to.
  TF_INLINE Vec scaled(const float* s) const { return fma(load(s), set1(shape.scale), zero()); }

  // Scores times scale, and what the mask adds to them.
  TF_INLINE Vec masked(const float* s, Vec mask) const {
    return select(equal(mask, set1(-kInf)), mask, fma(load(s), set1(shape.scale), mask));
  }

  // The scores of a row, kPanel of them, scaled, masked, -inf where hidden.
  TF_INLINE void apply_mask(const Panel& panel, long i, const float* shared, Vec (&x)[2]) const {
    const float* s = scores[panel.slot] + i * kPanel;
    if (panel.direct) {
      const char* place = block_mask.mask_at(i, panel.start);
      const long bytes = element_bytes(shape.mask_type);
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        _mm_prefetch(place + (kPanel + u * kLanes) * bytes, _MM_HINT_T1);
        x[u] = masked(s + u * kLanes, block_mask.mask_vector(place, u * kLanes));
      }
      return;
    }
    const float* mask = mask_of(panel, i, shared);
    const long visible = block_mask.visible(i, panel.start, panel.count);
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      if (mask != nullptr) {
        const long left = visible - u * kLanes;
        x[u] = masked(s + u * kLanes, left > 0 ? load_some(mask + u * kLanes, left) : set1(-kInf));
      } else {
        x[u] = scaled(s + u * kLanes);
      }
    }
    mask_out_of_range(panel, i, x);
  }

  // The mask of a panel where it is alike for all rows and not read where it lies.
  const float* shared_mask(const Panel& panel) const {
    return shape.mask != nullptr && shape.mask_stride[2] == 0 && !panel.direct
               ? block_mask.mask_row(0, panel.start, panel.count)
               : nullptr;
  }

  const AttentionShape& shape;
  const BlockMask block_mask;
  const long rows;
  float* const* const scores;
};

}  // namespace
}  // namespace tf::TF_ISA
