// Building blocks of the fused layer operators: linear layers, norms, attention and the
// feed-forward network on contiguous rows of any dtype, and scratch for the intermediate results.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/ops/attention/attention_host.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"
#include "cpu/ops/norm/layer_norm.h"

namespace tf {

using MaybeTensor = std::optional<Tensor>;

// Slots of the shared scratch; 0 and 1 hold weights packed during the call.
enum Slot { kHiddenSlot = 2, kProjectedSlot, kAttendedSlot, kNormedSlot, kStreamSlot };

inline char* shared_bytes(int slot, int64_t bytes) { return bytes_of(shared_scratch(slot), bytes); }

inline void check_block_input(const char* op, const Tensor& input) {
  STD_TORCH_CHECK(
      input.is_cpu() && (input.scalar_type() == ScalarType::Float || is_reduced_float(input)), op,
      ": input must be float32, bfloat16 or float16, and on the CPU");
}

// Parameters of a linear layer with weight (n, k), and its cached packed copy.
struct LinearParameters {
  Tensor weight;
  MaybeTensor packed, bias;

  LinearParameters(const char* op, const char* name, const MaybeTensor& w, const MaybeTensor& p,
                   const MaybeTensor& b, const Tensor& input, int64_t n, int64_t k)
      : weight(w ? *w : input), packed(p), bias(as_contiguous(b)) {
    const ScalarType type = input.scalar_type();
    STD_TORCH_CHECK(w && weight.is_cpu() && weight.scalar_type() == type && weight.dim() == 2 &&
                        weight.size(0) == n && weight.size(1) == k,
                    op, ": ", name, " must be (", n, ", ", k, ") of input's dtype");
    STD_TORCH_CHECK(weight.numel() <= kMaxElements, op, ": ", name, " is too large");
    STD_TORCH_CHECK(!bias || (bias->is_cpu() && bias->scalar_type() == type && bias->numel() == n),
                    op, ": the bias of ", name, " must have ", n, " elements of input's dtype");
  }
};

// A linear layer prepared for products of up to m rows; its weight is packed into shared scratch
// `slot` if there is no packed copy.
class PackedLinear {
 public:
  PackedLinear(const LinearParameters& linear, int64_t m, int slot) : linear_(linear) {
    if (!is_direct(linear.weight, linear.packed, m))
      panels_ = panels_of(linear.weight, linear.packed, slot, m);
  }

  // y = x W^T + bias + residual for m contiguous rows.
  void run(const void* x, int64_t m, const void* residual, void* y) const {
    run_part(x, m, residual, y, 0, linear_.weight.size(0));
  }
  // With rows [from, from + n) of W; `from` starts a panel.
  void run_part(const void* x, int64_t m, const void* residual, void* y, int64_t from,
                int64_t n) const {
    const Tensor& weight = linear_.weight;
    const int64_t k = weight.size(1);
    const Element type = element_of(weight);
    const LinearArgs args{
        type, x, nullptr, offset_ptr(data_of(linear_.bias), type, from), residual, y, m, k, n, k,
        n,    n, 0};
    if (panels_.data == nullptr) return run_direct_linear(args, weight, from);
    run_linear(args, panels_.from(from, k));
  }

 private:
  const LinearParameters& linear_;
  Panels panels_;
};

// Norm over rows of `columns`.
struct Norm {
  MaybeTensor weight, bias;
  double eps;

  Norm(const char* op, const MaybeTensor& w, const MaybeTensor& b, double e, const Tensor& input,
       int64_t columns)
      : weight(as_contiguous(w)), bias(as_contiguous(b)), eps(e) {
    for (const MaybeTensor* parameter : {&w, &b})
      STD_TORCH_CHECK(
          !*parameter ||
              ((*parameter)->is_cpu() && (*parameter)->numel() == columns &&
               ((*parameter)->scalar_type() == input.scalar_type() ||
                (is_reduced_float(input) && (*parameter)->scalar_type() == ScalarType::Float))),
          op, ": the norm must have ", columns, " elements of input's dtype");
    STD_TORCH_CHECK(!w || !b || w->scalar_type() == b->scalar_type(), op,
                    ": the norm's weight and bias must have the same dtype");
  }

  // May be in place; `like` gives the dtype.
  void run(const Tensor& like, const void* x, void* y, int64_t rows, int64_t columns) const {
    const Tensor& parameters = weight ? *weight : bias ? *bias : like;
    run_layer_norm({.type = element_of(like),
                    .weight_type = element_of(parameters),
                    .x = x,
                    .weight = weight ? weight->const_data_ptr() : nullptr,
                    .bias = bias ? bias->const_data_ptr() : nullptr,
                    .y = y,
                    .n = columns,
                    .x_stride = columns,
                    .eps = static_cast<float>(eps),
                    .dropout_columns = columns},
                   rows);
  }
};

// y = norm(x + f(x)), or x + f(norm(x)) if norm_first: f(input, residual) writes y. x and y are
// (rows, columns) of like's dtype and do not overlap.
template <class F>
void run_sublayer(const Tensor& like, const Norm& norm, bool norm_first, const void* x, void* y,
                  int64_t rows, int64_t columns, const F& f) {
  const void* from = x;
  if (norm_first) {
    void* normed =
        shared_bytes(kNormedSlot, rows * columns * static_cast<int64_t>(like.element_size()));
    norm.run(like, x, normed, rows, columns);
    from = normed;
  }
  f(from, x);
  if (!norm_first) norm.run(like, y, y, rows, columns);
}

// y = second(activation(first(x))) + residual for m rows.
inline void run_feed_forward(const LinearParameters& first, const LinearParameters& second,
                             int activation, const void* x, int64_t m, const void* residual,
                             void* y) {
  const int64_t f = first.weight.size(0), k = first.weight.size(1), n = second.weight.size(0);
  run_feed_forward({.type = element_of(first.weight),
                    .x = x,
                    .bias1 = data_of(first.bias),
                    .bias2 = data_of(second.bias),
                    .y = y,
                    .m = m,
                    .k = k,
                    .f = f,
                    .n = n,
                    .x_stride = k,
                    .activation = activation,
                    .residual = residual,
                    .residual_stride = n},
                   first.weight, first.packed, second.weight, second.packed, kHiddenSlot);
}

// Sub-layers of Transformer layers, as passed to the operators on whole stacks.

enum class SublayerKind : int64_t { self_attention, cross_attention, feed_forward };

// Two linear layers, with attention or an activation between them, and the norm around them.
struct Sublayer {
  SublayerKind kind;
  LinearParameters first, second;
  Norm norm;
};

// Parses the sub-layers of a stack whose layers each consist of `kinds`. Per sub-layer there are
// six parameters (weight and bias of the first, of the second linear layer, and of the norm), two
// packed weights, and the norm's eps. `cross_parts`: how many of the query, key and value
// projections the first weight of cross-attention contains.
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
    const MaybeTensor* packed_pair = &packed[2 * i];
    const Norm norm(op, p[4], p[5], eps[i], input, width);
    if (kind == SublayerKind::feed_forward) {
      const int64_t hidden = p[0] && p[0]->dim() == 2 ? p[0]->size(0) : 0;
      sublayers.push_back({kind,
                           {op, "weight1", p[0], packed_pair[0], p[1], input, hidden, width},
                           {op, "weight2", p[2], packed_pair[1], p[3], input, width, hidden},
                           norm});
    } else {
      const int64_t parts = kind == SublayerKind::self_attention ? 3 : cross_parts;
      sublayers.push_back(
          {kind,
           {op, "in_weight", p[0], packed_pair[0], p[1], input, parts * width, width},
           {op, "out_weight", p[2], packed_pair[1], p[3], input, width, width},
           norm});
    }
  }
  return sublayers;
}

// Runs the sub-layers in order, the last one into `result`: run(sub-layer, index, from, to).
template <class F>
void run_sublayers(const std::vector<Sublayer>& sublayers, const void* from, void* result,
                   int64_t bytes, const F& run) {
  const size_t count = sublayers.size();
  void* other = count > 1 ? shared_bytes(kStreamSlot, bytes) : nullptr;
  for (size_t i = 0; i < count; ++i) {
    // Alternating buffers, so that the last one writes the result.
    void* to = (count - i) % 2 == 1 ? result : other;
    run(sublayers[i], i, from, to);
    from = to;
  }
}

}  // namespace tf
