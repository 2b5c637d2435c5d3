// Transformer layers in one call, for inference: a whole stack, one layer, or a single sub-layer
// with its projections, residual connection and norm; and one decoding step through a whole stack,
// whose new tokens attend to themselves and to all previous ones, of which keys and values are
// cached, and to the encoder output, if any. Intermediate results are in this thread's scratch, so
// a call costs one dispatch and only the result's memory.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/ops/attention/attention_host.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"
#include "cpu/ops/norm/layer_norm.h"

namespace tf {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Slots of the shared scratch; 0 and 1 hold weights packed during the call.
enum Slot { kHiddenSlot = 2, kProjectedSlot, kAttendedSlot, kNormedSlot, kStreamSlot };

char* shared_bytes(int slot, int64_t bytes) { return bytes_of(shared_scratch(slot), bytes); }

void check_block_input(const char* op, const Tensor& input) {
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
std::vector<Sublayer> read_sublayers(const char* op, const std::vector<SublayerKind>& kinds,
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

// Runs sub-layers on the rows of a tensor: y = norm(x + f(x)), or x + f(norm(x)) if norm_first.
class LayerRunner {
 public:
  LayerRunner(const Tensor& input, bool norm_first, int activation)
      : x_(as_contiguous(input)),
        rows_(row_count(x_)),
        width_(x_.size(x_.dim() - 1)),
        element_(static_cast<int64_t>(x_.element_size())),
        norm_first_(norm_first),
        activation_(activation) {}

 protected:
  // In order; attend(sub-layer, index, from) returns what the output projection of attention takes.
  template <class Attend>
  Tensor run_sublayers(const std::vector<Sublayer>& sublayers, const Attend& attend) const {
    Tensor output = empty_tensor_like(x_);
    if (rows_ * width_ == 0) return output;
    const size_t count = sublayers.size();
    void* other = count > 1 ? shared_rows(kStreamSlot, width_) : nullptr;
    const void* x = x_.const_data_ptr();
    for (size_t i = 0; i < count; ++i) {
      const Sublayer& layer = sublayers[i];
      // Alternating buffers, so that the last one writes the result.
      void* y = (count - i) % 2 == 1 ? output.mutable_data_ptr() : other;
      const void* from = x;
      if (norm_first_) {
        void* normed = shared_rows(kNormedSlot, width_);
        layer.norm.run(x_, x, normed, rows_, width_);
        from = normed;
      }
      if (layer.kind == SublayerKind::feed_forward) {
        feed_forward(layer.first, layer.second, from, x, y);
      } else {
        const void* attended = attend(layer, i, from);
        PackedLinear(layer.second, rows_, 1).run(attended, rows_, x, y);
      }
      if (!norm_first_) layer.norm.run(x_, y, y, rows_, width_);
      x = y;
    }
    return output;
  }

  // Shared scratch for `columns` elements a row.
  char* shared_rows(int slot, int64_t columns) const {
    return shared_bytes(slot, rows_ * columns * element_);
  }

  char* project(const LinearParameters& in, const void* from) const {
    char* projected = shared_rows(kProjectedSlot, in.weight.size(0));
    PackedLinear(in, rows_, 0).run(from, rows_, nullptr, projected);
    return projected;
  }

  const Tensor x_;
  const int64_t rows_, width_, element_;

 private:
  // y = second(activation(first(x))) + residual
  void feed_forward(const LinearParameters& first, const LinearParameters& second, const void* x,
                    const void* residual, void* y) const {
    const int64_t f = first.weight.size(0), k = first.weight.size(1), n = second.weight.size(0);
    run_feed_forward({.type = element_of(first.weight),
                      .x = x,
                      .bias1 = data_of(first.bias),
                      .bias2 = data_of(second.bias),
                      .y = y,
                      .m = rows_,
                      .k = k,
                      .f = f,
                      .n = n,
                      .x_stride = k,
                      .activation = activation_,
                      .residual = residual,
                      .residual_stride = n},
                     first.weight, first.packed, second.weight, second.packed, kHiddenSlot);
  }

  bool norm_first_;
  int activation_;
};

constexpr const char *kOp = "layers", *kDecodeOp = "decode_stack";

// Arguments of an attention except its tensors: shape, mask and sequence starts.
struct AttentionCall {
  AttentionArgs args{};
  std::vector<int64_t> query_starts, key_starts;
};

std::vector<int64_t> read_starts(const MaybeTensor& starts, int64_t rows) {
  STD_TORCH_CHECK(starts && starts->numel() > 0, kOp, ": starts must not be empty");
  std::vector<int64_t> found = to_int64("starts", starts, starts->numel());
  for (size_t i = 0; i + 1 < found.size(); ++i)
    STD_TORCH_CHECK(found[i] >= 0 && found[i] <= found[i + 1], kOp, ": starts must not fall");
  STD_TORCH_CHECK(found[0] == 0 && found.back() == rows, kOp, ": starts must go from 0 to ", rows,
                  ", the number of rows");
  return found;
}

int64_t largest_gap(const std::vector<int64_t>& starts) {
  int64_t largest = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    largest = std::max(largest, starts[i + 1] - starts[i]);
  return largest;
}

class Layers : LayerRunner {
 public:
  Layers(const Tensor& input, const MaybeTensor& memory, bool norm_first, int64_t heads,
         int activation, bool batch_first, const MaybeTensor& starts,
         const MaybeTensor& memory_starts)
      : LayerRunner(input, norm_first, activation),
        memory_(as_contiguous(memory)),
        ragged_(starts.has_value()),
        batch_first_(batch_first || ragged_) {
    const int64_t dims = ragged_ ? 2 : 3;
    STD_TORCH_CHECK(x_.dim() == dims, kOp, ": input must have ", dims, " dimensions");
    STD_TORCH_CHECK(heads > 0 && width_ % heads == 0, kOp, ": the heads must divide the width");
    if (memory_) {
      check_type(kOp, "memory", *memory_, x_.scalar_type(), "input");
      STD_TORCH_CHECK(memory_->dim() == dims && memory_->size(dims - 1) == width_, kOp,
                      ": memory must be as input");
      STD_TORCH_CHECK(width_ % panel_columns() == 0, kOp,
                      ": with memory the width must be a multiple of a panel");
      memory_rows_ = row_count(*memory_);
    }
    STD_TORCH_CHECK(!ragged_ || memory_starts.has_value() == memory_.has_value(), kOp,
                    ": starts come in pairs");
    set_shape(own_, heads, starts, starts, x_);
    if (memory_) set_shape(cross_, heads, starts, memory_starts, *memory_);
  }

  void set_masks(const MaybeTensor& mask, bool is_causal, const MaybeTensor& memory_mask,
                 bool memory_is_causal) {
    set_attention_mask(own_, mask, is_causal);
    if (memory_) set_attention_mask(cross_, memory_mask, memory_is_causal);
  }

  Tensor run(const std::vector<Sublayer>& sublayers) const {
    return run_sublayers(sublayers, [&](const Sublayer& layer, size_t, const void* from) {
      return layer.kind == SublayerKind::self_attention ? self_attention(layer.first, from)
                                                        : cross_attention(layer.first, from);
    });
  }

 private:
  void set_shape(AttentionCall& call, int64_t heads, const MaybeTensor& starts,
                 const MaybeTensor& key_starts, const Tensor& source) const {
    AttentionArgs& args = call.args;
    if (ragged_) {
      call.query_starts = read_starts(starts, rows_);
      call.key_starts = read_starts(key_starts, source.size(0));
      STD_TORCH_CHECK(call.query_starts.size() == call.key_starts.size(), kOp,
                      ": starts come in pairs");
      args.query_starts = call.query_starts.data();
      args.key_starts = call.key_starts.data();
      args.batch = static_cast<int64_t>(call.query_starts.size()) - 1;
      args.queries = largest_gap(call.query_starts);
      args.keys = largest_gap(call.key_starts);
    } else {
      const int64_t batch_dim = batch_first_ ? 0 : 1;
      STD_TORCH_CHECK(x_.size(batch_dim) == source.size(batch_dim), kOp, ": the batches differ");
      args.batch = x_.size(batch_dim);
      args.queries = x_.size(1 - batch_dim);
      args.keys = source.size(1 - batch_dim);
    }
    args.type = element_of(x_);
    args.heads = args.key_heads = heads;
    args.size = args.value_size = width_ / heads;
    args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(args.size));
  }

  void set_attention_mask(AttentionCall& call, const MaybeTensor& mask, bool is_causal) const {
    AttentionArgs& args = call.args;
    args.causal = is_causal;
    set_mask(args, mask, {args.batch, args.heads, args.queries, args.keys}, x_.scalar_type());
  }

  // Queries, keys and values of each row are next to each other.
  const void* self_attention(const LinearParameters& in, const void* from) const {
    const char* projected = project(in, from);
    return attend(own_, projected, 3 * width_, projected + width_ * element_, 3 * width_);
  }

  // The queries are in a block of their own.
  const void* cross_attention(const LinearParameters& in, const void* from) const {
    char* queries = shared_bytes(kProjectedSlot, (rows_ + 2 * memory_rows_) * width_ * element_);
    char* keys = queries + rows_ * width_ * element_;
    const PackedLinear ready(in, std::max(rows_, memory_rows_), 0);
    ready.run_part(from, rows_, nullptr, queries, 0, width_);
    ready.run_part(memory_->const_data_ptr(), memory_rows_, nullptr, keys, width_, 2 * width_);
    return attend(cross_, queries, width_, keys, 2 * width_);
  }

  // Rows of queries are query_row elements apart; rows of keys, key_row apart, are followed by the
  // values.
  const void* attend(const AttentionCall& call, const void* queries, int64_t query_row,
                     const char* keys, int64_t key_row) const {
    void* attended = shared_rows(kAttendedSlot, width_);
    AttentionArgs args = call.args;
    args.query = queries;
    args.key = keys;
    args.value = keys + width_ * element_;
    args.output = attended;
    const auto strides = [&](long* stride, int64_t row, int64_t length) {
      stride[0] = batch_first_ ? length * row : row;
      stride[1] = args.size;
      stride[2] = batch_first_ ? row : args.batch * row;
    };
    strides(args.query_stride, query_row, args.queries);
    strides(args.key_stride, key_row, args.keys);
    strides(args.value_stride, key_row, args.keys);
    strides(args.output_stride, width_, args.queries);
    args.query_stride[3] = args.key_stride[3] = args.value_stride[3] = 1;
    run_attention(args);
    return attended;
  }

  MaybeTensor memory_;
  bool ragged_, batch_first_;
  int64_t memory_rows_ = 0;
  AttentionCall own_, cross_;
};

Tensor layers(Tensor input, MaybeTensor memory, std::vector<int64_t> kinds,
              std::vector<MaybeTensor> parameters, std::vector<MaybeTensor> packed,
              std::vector<double> eps, bool norm_first, int64_t heads, int64_t activation,
              bool batch_first, MaybeTensor mask, bool is_causal, MaybeTensor memory_mask,
              bool memory_is_causal, MaybeTensor starts, MaybeTensor memory_starts) {
  check_block_input(kOp, input);
  std::vector<SublayerKind> each;
  for (const int64_t kind : kinds) {
    STD_TORCH_CHECK(kind >= 0 && kind <= 2, kOp, ": there is no sub-layer of kind ", kind);
    each.push_back(static_cast<SublayerKind>(kind));
    STD_TORCH_CHECK(each.back() != SublayerKind::cross_attention || memory.has_value(), kOp,
                    ": attention to a memory needs one");
  }
  Layers run(input, memory, norm_first, heads, checked_activation(kOp, activation), batch_first,
             starts, memory_starts);
  run.set_masks(mask, is_causal, memory_mask, memory_is_causal);
  Tensor output = run.run(read_sublayers(kOp, each, parameters, packed, eps, input, 3));
  trim_shared_scratch();
  return output;
}

// Cached keys and values (R, H, places, D), with their strides.
struct KeysAndValues {
  char *keys, *values;
  int64_t rows, heads, places, size, stride[3];  // strides in elements; D is adjacent

  // Of a tensor (2, R, H, places, D), or of item `layer` of (layers, 2, R, H, places, D).
  KeysAndValues(const Tensor& both, void* data, int64_t layer) : keys(static_cast<char*>(data)) {
    const int64_t first = both.dim() - 5, element = static_cast<int64_t>(both.element_size());
    if (first > 0) keys += layer * both.stride(0) * element;
    values = keys + both.stride(first) * element;
    rows = both.size(first + 1);
    heads = both.size(first + 2);
    places = both.size(first + 3);
    size = both.size(first + 4);
    for (int d = 0; d < 3; ++d) stride[d] = both.stride(first + 1 + d);
  }
};

class Step : LayerRunner {
 public:
  using LayerRunner::LayerRunner;

  // `layers`: of how many layers the sub-layers are. `start`: how many previous tokens there are.
  Tensor run(const std::vector<Sublayer>& sublayers, size_t layers, Tensor& cache, int64_t start,
             const std::vector<Tensor>& memories, const MaybeTensor& mask,
             const int64_t* lengths) const {
    void* cached = cache.mutable_data_ptr();
    const size_t each = sublayers.size() / layers;
    return run_sublayers(sublayers, [&](const Sublayer& sublayer, size_t i, const void* from) {
      const size_t layer = i / each;
      if (sublayer.kind == SublayerKind::self_attention)
        return self_attention(
            sublayer.first, KeysAndValues(cache, cached, static_cast<int64_t>(layer)), start, from);
      const Tensor& memory = memories[layer];
      const KeysAndValues at(memory, const_cast<void*>(memory.const_data_ptr()), 0);
      return attend(at, at.places, project(sublayer.first, from), width_, false, mask, lengths);
    });
  }

 private:
  // Appends the keys and values of the new tokens to those of the previous ones.
  const void* self_attention(const LinearParameters& in, const KeysAndValues& cache, int64_t start,
                             const void* from) const {
    const char* projected = project(in, from);
    append(projected, cache, start);
    const int64_t length = rows_ / cache.rows;
    return attend(cache, start + length, projected, 3 * width_, length > 1, std::nullopt, nullptr);
  }

  // `projected` holds queries, keys and values of each token next to each other.
  void append(const char* projected, const KeysAndValues& cache, int64_t start) const {
    const int64_t length = rows_ / cache.rows, each = length * cache.size;
    const size_t bytes = static_cast<size_t>(cache.size * element_);
    torch::stable::parallel_for(
        0, cache.rows * cache.heads, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, each)),
        [&](int64_t begin, int64_t end) {
          for (int64_t item = begin; item < end; ++item) {
            const int64_t r = item / cache.heads, head = item % cache.heads;
            const char* from =
                projected + (r * length * 3 * width_ + width_ + head * cache.size) * element_;
            for (int64_t t = 0; t < length; ++t, from += 3 * width_ * element_) {
              const int64_t place =
                  (r * cache.stride[0] + head * cache.stride[1] + (start + t) * cache.stride[2]) *
                  element_;
              std::memcpy(cache.keys + place, from, bytes);
              std::memcpy(cache.values + place, from + width_ * element_, bytes);
            }
          }
        });
  }

  // Attention of the queries, query_row elements apart, to the first `places` keys.
  const void* attend(const KeysAndValues& at, int64_t places, const void* query, int64_t query_row,
                     bool causal, const MaybeTensor& mask, const int64_t* lengths) const {
    void* attended = shared_rows(kAttendedSlot, width_);
    AttentionArgs args{};
    args.type = element_of(x_);
    args.query = query;
    args.key = at.keys;
    args.value = at.values;
    args.output = attended;
    args.batch = at.rows;
    args.heads = args.key_heads = at.heads;
    args.queries = rows_ / at.rows;
    args.keys = places;
    args.size = args.value_size = at.size;
    args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(at.size));
    args.causal = causal;
    args.key_lengths = lengths;
    const int64_t query_stride[] = {args.queries * query_row, at.size, query_row, 1};
    const int64_t output_stride[] = {args.queries * width_, at.size, width_};
    for (int d = 0; d < 4; ++d) {
      args.query_stride[d] = query_stride[d];
      args.key_stride[d] = args.value_stride[d] = d == 3 ? 1 : at.stride[d];
      if (d < 3) args.output_stride[d] = output_stride[d];
    }
    set_mask(args, mask, {at.rows, at.heads, args.queries, places}, x_.scalar_type());
    run_attention(args);
    return attended;
  }
};

void check_places(const char* name, const Tensor& tensor, const Tensor& input, int64_t dims) {
  const bool fits = tensor.is_cpu() && tensor.scalar_type() == input.scalar_type() &&
                    tensor.dim() == dims && tensor.size(dims - 5) == 2 &&
                    tensor.size(dims - 4) > 0 && tensor.stride(dims - 1) == 1;
  STD_TORCH_CHECK(fits, kDecodeOp, ": ", name, " must be (", dims == 6 ? "layers, " : "",
                  "2, R, H, places, D) of input's dtype, D adjacent");
  STD_TORCH_CHECK(tensor.size(dims - 3) * tensor.size(dims - 1) == input.size(1) &&
                      input.size(0) % tensor.size(dims - 4) == 0,
                  kDecodeOp, ": input does not fit ", name);
}

Tensor decode_stack(Tensor input, Tensor cache, int64_t start, std::vector<Tensor> memories,
                    std::vector<MaybeTensor> parameters, std::vector<MaybeTensor> packed,
                    std::vector<double> eps, bool norm_first, int64_t activation, MaybeTensor mask,
                    MaybeTensor key_lengths) {
  check_block_input(kDecodeOp, input);
  STD_TORCH_CHECK(input.dim() == 2, kDecodeOp, ": input must be (rows, width)");
  check_places("cache", cache, input, 6);
  const int64_t layers = cache.size(0), rows = input.size(0);
  STD_TORCH_CHECK(layers > 0, kDecodeOp, ": the cache has no layers");
  const bool crossed = !memories.empty();
  STD_TORCH_CHECK(!crossed || static_cast<int64_t>(memories.size()) == layers, kDecodeOp,
                  ": there must be a memory for each of ", layers, " layers, or none");
  const int64_t length = rows / cache.size(2);
  STD_TORCH_CHECK(start >= 0 && length <= cache.size(4) && start <= cache.size(4) - length,
                  kDecodeOp, ": the cache has ", cache.size(4), " places");
  STD_TORCH_CHECK(length <= 1 || start == 0, kDecodeOp,
                  ": several tokens at once must be the first");
  std::vector<SublayerKind> kinds{SublayerKind::self_attention, SublayerKind::feed_forward};
  if (crossed) kinds.insert(kinds.begin() + 1, SublayerKind::cross_attention);
  STD_TORCH_CHECK(eps.size() == kinds.size() * static_cast<size_t>(layers), kDecodeOp,
                  ": there must be ", kinds.size(), " sub-layers for each of ", layers, " layers");
  const std::vector<Sublayer> sublayers =
      read_sublayers(kDecodeOp, kinds, parameters, packed, eps, input, 1);
  for (const Tensor& memory : memories) {
    check_places("memory", memory, input, 5);
    STD_TORCH_CHECK(memory.sizes().equals(memories[0].sizes()), kDecodeOp,
                    ": the memories differ in shape");
  }
  std::vector<int64_t> lengths;
  if (crossed) lengths = to_int64("key_lengths", key_lengths, memories[0].size(1));
  const Step step(input, norm_first, checked_activation(kDecodeOp, activation));
  Tensor output = step.run(sublayers, static_cast<size_t>(layers), cache, start, memories, mask,
                           key_lengths ? lengths.data() : nullptr);
  trim_shared_scratch();
  return output;
}

// An uninitialised tensor of `sizes` and like's dtype.
Tensor uninitialized(Tensor like, std::vector<int64_t> sizes) {
  STD_TORCH_CHECK(like.is_cpu(), "uninitialized: like must be on the CPU");
  return empty_tensor(like, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "layers.cpu(Tensor input, Tensor? memory, int[] kinds, Tensor?[] parameters, "
      "Tensor?[] packed, float[] eps, bool norm_first, int heads, int activation, "
      "bool batch_first, Tensor? mask, bool is_causal, Tensor? memory_mask, "
      "bool memory_is_causal, Tensor? starts, Tensor? memory_starts) -> Tensor");
  m.def(
      "decode_stack.cpu(Tensor input, Tensor(a!) cache, int start, Tensor[] memories, "
      "Tensor?[] parameters, Tensor?[] packed, float[] eps, bool norm_first, int activation, "
      "Tensor? mask, Tensor? key_lengths) -> Tensor");
  m.def("uninitialized.cpu(Tensor like, int[] sizes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("layers.cpu", TF_BOX(&tf::layers));
  m.impl("decode_stack.cpu", TF_BOX(&tf::decode_stack));
  m.impl("uninitialized.cpu", TF_BOX(&tf::uninitialized));
}
