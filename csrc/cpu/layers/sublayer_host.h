// The sub-layers of Transformer layers, as operators on whole stacks are given them.
#pragma once

#include <vector>

#include "cpu/layers/block_host.h"

namespace tf {

enum class SublayerKind : int64_t { self_attention, cross_attention, feed_forward };

// Two linear maps with something between them, and the norm around it all.
struct Sublayer {
  SublayerKind kind;
  Map first, second;
  Norm norm;
};

// All sub-layers of a stack whose layers are each made of `kinds`. Of each sub-layer there are six
// parameters: first weight and bias, second weight and bias, the norm's weight and bias; what is
// kept of the two weights, packed; and the norm's eps. `cross_parts`: how many of the projections
// of queries, keys and values the first weight of attention to a memory holds.
inline std::vector<Sublayer> read_sublayers(const char* op, const std::vector<SublayerKind>& kinds,
                                            const std::vector<MaybeTensor>& parameters,
                                            const std::vector<MaybeTensor>& packed,
                                            const std::vector<double>& eps, const Tensor& input,
                                            int64_t cross_parts) {
  const size_t count = eps.size();
  STD_TORCH_CHECK(!kinds.empty() && count > 0 && count % kinds.size() == 0 &&
                      parameters.size() == 6 * count && packed.size() == 2 * count,
                  op, ": there must be 6 parameters, 2 packed weights and an eps for each of ",
                  count, " sub-layers, and ", kinds.size(), " sub-layers a layer");
  const int64_t width = input.size(input.dim() - 1);
  std::vector<Sublayer> sublayers;
  sublayers.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const SublayerKind kind = kinds[i % kinds.size()];
    const MaybeTensor* p = &parameters[6 * i];
    const MaybeTensor* kept = &packed[2 * i];
    const Norm norm(op, p[4], p[5], eps[i], input, width);
    if (kind == SublayerKind::feed_forward) {
      const int64_t hidden = p[0] && p[0]->dim() == 2 ? p[0]->size(0) : 0;
      sublayers.push_back({kind,
                           {op, "weight1", p[0], kept[0], p[1], input, hidden, width},
                           {op, "weight2", p[2], kept[1], p[3], input, width, hidden},
                           norm});
    } else {
      const int64_t parts = kind == SublayerKind::self_attention ? 3 : cross_parts;
      sublayers.push_back({kind,
                           {op, "in_weight", p[0], kept[0], p[1], input, parts * width, width},
                           {op, "out_weight", p[2], kept[1], p[3], input, width, width},
                           norm});
    }
  }
  return sublayers;
}

// One sub-layer after the other, the last one to `result`: run(sub-layer, its place, from, to).
template <class F>
void run_sublayers(const std::vector<Sublayer>& sublayers, const void* from, void* result,
                   int64_t bytes, const F& run) {
  const size_t count = sublayers.size();
  void* other = count > 1 ? shared_bytes(kStreamSlot, bytes) : nullptr;
  for (size_t i = 0; i < count; ++i) {
    // In turns, so that the last one writes the result.
    void* to = (count - i) % 2 == 1 ? result : other;
    run(sublayers[i], i, from, to);
    from = to;
  }
}

}  // namespace tf
