// Transformer layers in one call, for inference: a whole stack, one layer, or a single sub-layer
// with its projections, residual connection and norm. Also one decoding step through a whole stack:
// new tokens attend to themselves, to previous tokens by cached keys and values, and to the encoder
// output, if any. Intermediate results are in this thread's scratch, so a call costs one dispatch
// and only the result's memory.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/ops/attention/attention_host.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"
#include "cpu/ops/int8_linear/int8_linear.h"
#include "cpu/ops/layer_norm/layer_norm.h"
#include "cpu/ops/pointwise/pointwise.h"

namespace tf {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Slots of the shared scratch; 0 and 1 hold weights packed during the call.
enum Slot {
  kHiddenSlot = 2,
  kProjectedSlot,
  kAttendedSlot,
  kNormedSlot,
  kStreamSlot,
  kMemorySlot,
  kGateSlot,         // a gate packed during the call
  kGatedHiddenSlot,  // stays the same through a call, unlike kHiddenSlot
};

char* shared_bytes(int slot, int64_t bytes) { return bytes_of(shared_scratch(slot), bytes); }

// Parameters of a linear layer with weight (n, k), and the cached packed copy of the weight. An
// int8 weight has a scale: float32, one value per row. It may have factors: one per column, which
// multiply the input.
struct LinearParameters {
  Tensor weight;
  MaybeTensor packed, bias, scale, factors;

  LinearParameters(const char* op, const char* name, const MaybeTensor& w, const MaybeTensor& p,
                   const MaybeTensor& b, const MaybeTensor& s, const MaybeTensor& f,
                   const Tensor& input, int64_t n, int64_t k)
      : weight(w ? *w : input),
        packed(p),
        bias(as_contiguous(b)),
        scale(as_contiguous(s)),
        factors(as_contiguous(f)) {
    const ScalarType type = input.scalar_type();
    STD_TORCH_CHECK(w && weight.is_cpu() &&
                        weight.scalar_type() == (scale ? ScalarType::Char : type) &&
                        weight.dim() == 2 && weight.size(0) == n && weight.size(1) == k,
                    op, ": ", name, " must be (", n, ", ", k, ") of input's dtype",
                    scale ? ", or int8 with a scale" : "");
    STD_TORCH_CHECK(weight.numel() <= kMaxElements, op, ": ", name, " is too large");
    STD_TORCH_CHECK(!bias || (bias->is_cpu() && bias->scalar_type() == type && bias->numel() == n),
                    op, ": the bias of ", name, " must have ", n, " elements of input's dtype");
    if (!scale) return;
    check_int8_weight(op, name, weight);
    STD_TORCH_CHECK(
        scale->is_cpu() && scale->scalar_type() == ScalarType::Float && scale->numel() == n, op,
        ": the scale of ", name, " must have ", n, " float32 elements");
    check_int8_factors(op, name, factors, k);
    if (int8_panels_of(weight, packed) == nullptr) packed = pack_int8_weight(weight);
  }

  const float* scales(int64_t from = 0) const {
    return scale ? static_cast<const float*>(scale->const_data_ptr()) + from : nullptr;
  }
};

// A linear layer prepared for products of up to m rows; its weight is packed into shared scratch
// `slot` if there is no packed copy. Only 8-bit products may have other types of x and y.
class PackedLinear {
 public:
  PackedLinear(const LinearParameters& linear, Element type, int64_t m, int slot, Element x_type,
               Element y_type)
      : linear_(linear), type_(type) {
    const Tensor& weight = linear.weight;
    if (linear.scale)
      panels_ = {TF_DISPATCH(int8_linear_kernels, type, x_type, y_type),
                 linear.packed->const_data_ptr()};
    else if (!is_direct(weight, m))
      panels_ = panels_of(weight, linear.packed, slot, m);
  }

  // Returns the arguments of y = x W^T + bias + residual for m contiguous rows.
  LinearArgs arguments(const void* x, int64_t m, const void* residual, void* y, int64_t n) const {
    const int64_t k = linear_.weight.size(1);
    return {.type = type_,
            .x = x,
            .packed = nullptr,
            .bias = nullptr,
            .residual = residual,
            .y = y,
            .m = m,
            .k = k,
            .n = n,
            .x_stride = k,
            .residual_stride = n,
            .y_stride = n,
            .activation = kIdentity};
  }

  // Runs the layer with rows [from, from + n) of W; `from` starts a panel.
  void run(LinearArgs args, int64_t from = 0) const {
    set_parameters(args, from);
    if (panels_.data == nullptr) return run_direct_linear(args, linear_.weight, from);
    run_linear(args, panels_.from(from, args.k));
  }
  // Like run() for rows [begin, end) and the first n rows of an 8-bit W, on this thread.
  void run_rows(LinearArgs args, int64_t begin, int64_t end) const {
    set_parameters(args, 0);
    args.packed = panels_.data;
    const LinearKernels& kernels = *panels_.kernels;
    kernels.block(args, begin, end, 0, (args.n + kernels.panel - 1) / kernels.panel,
                  bytes_of(kernel_scratch(), kernels.scratch(args)));
  }
  // Like run() for an 8-bit W, on this thread. Quantises x into kernel scratch, unless the previous
  // call, of `before`, did so with the same x and the same factors.
  void run_quantized(LinearArgs args, const PackedLinear* before, int64_t from = 0) const {
    set_parameters(args, from);
    args.packed = panels_.from(from, args.k).data;
    const LinearKernels& kernels = *panels_.kernels;
    char* quantized = bytes_of(kernel_scratch(), kernels.panels_scratch(args));
    if (before == nullptr || !has_factors_of(*before)) kernels.fill(args, quantized);
    kernels.panels(args, 0, (args.n + kernels.panel - 1) / kernels.panel, quantized);
  }

 private:
  void set_parameters(LinearArgs& args, int64_t from) const {
    args.bias = offset_ptr(data_of(linear_.bias), type_, from);
    args.scale = linear_.scales(from);
    args.factors = floats_of(linear_.factors);
  }
  bool has_factors_of(const PackedLinear& other) const {
    const float *mine = floats_of(linear_.factors), *theirs = floats_of(other.linear_.factors);
    if (mine == theirs) return true;
    const size_t bytes = static_cast<size_t>(linear_.weight.size(1)) * sizeof(float);
    return mine != nullptr && theirs != nullptr && std::memcmp(mine, theirs, bytes) == 0;
  }

  const LinearParameters& linear_;
  Element type_;
  Panels panels_;
};

// The `kind` of a sub-layer without a norm.
constexpr int64_t kNoNorm = -1;

// Norm over rows of `columns`.
struct Norm {
  MaybeTensor weight, bias;
  double eps;
  int64_t kind;  // a NormKind, or kNoNorm

  Norm(const char* op, int64_t norm, const MaybeTensor& w, const MaybeTensor& b, double e,
       const Tensor& input, int64_t columns)
      : weight(as_contiguous(w)), bias(as_contiguous(b)), eps(e), kind(norm) {
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
  LayerNormArgs arguments(const Tensor& like, const void* x, void* y, int64_t columns) const {
    const Tensor& parameters = weight ? *weight : bias ? *bias : like;
    return {.type = element_of(like),
            .weight_type = element_of(parameters),
            .x = x,
            .weight = weight ? weight->const_data_ptr() : nullptr,
            .bias = bias ? bias->const_data_ptr() : nullptr,
            .y = y,
            .n = columns,
            .x_stride = columns,
            .eps = static_cast<float>(eps),
            .dropout_columns = columns,
            .kind = static_cast<NormKind>(kind)};
  }
};

// Sub-layers of Transformer layers, as passed to the operators on whole stacks.

// `gated_feed_forward` is second(activation(gate(x)) * up(x)); the first weight has the rows of
// gate, then those of up. Two kinds are parts of the sub-layer after them. `queries_and_keys`: the
// linear layers of queries and of keys (width, width) of attention, whose first linear layer is
// then the one of values. `gate`: that of a gated network, whose first linear layer is then `up`;
// both weights are the gate's.
enum class SublayerKind : int64_t {
  self_attention,
  cross_attention,
  feed_forward,
  queries_and_keys,
  gated_feed_forward,
  gate
};
constexpr int64_t kSublayerKinds = 6;

bool is_attention(SublayerKind kind) {
  return kind == SublayerKind::self_attention || kind == SublayerKind::cross_attention;
}

bool is_part(SublayerKind kind) {
  return kind == SublayerKind::queries_and_keys || kind == SublayerKind::gate;
}

// Two linear layers, with attention or an activation between them, and the norm around them.
struct Sublayer {
  SublayerKind kind;
  LinearParameters first, second;
  Norm norm;
  // The linear layers of queries and keys, or of the gate; empty: `first` holds all of them.
  std::vector<LinearParameters> parts{};
};

// Columns of attention's queries, heads * D, and of its keys, (heads of keys) * D.
struct AttentionWidths {
  int64_t query, key;
};

// Parses the sub-layers of a stack whose layers each consist of `kinds`. Each sub-layer has six
// parameters (weight and bias of the first linear layer, of the second, and of the norm), two
// packed weights and the norm's eps. If any weight of the stack is int8, each sub-layer also has
// two scales and two vectors of factors. `norms`: the kind of norm of each of `kinds`, or kNoNorm.
// `projects_memory`: the first weight of cross-attention projects keys and values, too.
std::vector<Sublayer> read_sublayers(const char* op, const std::vector<SublayerKind>& kinds,
                                     const std::vector<MaybeTensor>& parameters,
                                     const std::vector<MaybeTensor>& packed,
                                     const std::vector<MaybeTensor>& scales,
                                     const std::vector<double>& eps,
                                     const std::vector<int64_t>& norms, const Tensor& input,
                                     AttentionWidths widths, bool projects_memory) {
  const size_t count = eps.size();
  STD_TORCH_CHECK(!kinds.empty() && count > 0 && count % kinds.size() == 0 &&
                      parameters.size() == 6 * count && packed.size() == 2 * count &&
                      (scales.empty() || scales.size() == 4 * count),
                  op, ": there must be 6 parameters, 2 packed weights, an eps and 4 or no scales ",
                  "for each of ", count, " sub-layers, and ", kinds.size(), " sub-layers a layer");
  STD_TORCH_CHECK(norms.size() == kinds.size(), op, ": there must be a kind of norm for each of ",
                  kinds.size(), " kinds of sub-layers");
  const int64_t width = input.size(input.dim() - 1);
  std::vector<Sublayer> sublayers;
  sublayers.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const SublayerKind kind = kinds[i % kinds.size()];
    const MaybeTensor* p = &parameters[6 * i];
    const auto linear = [&](const char* name, size_t which, int64_t n, int64_t k, size_t at) {
      const MaybeTensor* own = &parameters[6 * at + 2 * which];
      const auto scale = [&](size_t i) {
        return scales.empty() ? MaybeTensor() : scales[4 * at + i];
      };
      return LinearParameters(op, name, own[0], packed[2 * at + which], own[1], scale(which),
                              scale(2 + which), input, n, k);
    };
    if (is_part(kind)) {
      const size_t next = i % kinds.size() + 1;
      STD_TORCH_CHECK(next < kinds.size() && (kind == SublayerKind::gate
                                                  ? kinds[next] == SublayerKind::gated_feed_forward
                                                  : is_attention(kinds[next])),
                      op, ": projections of queries and keys must precede attention, ",
                      "and gates a gated network");
      continue;
    }
    const Norm norm(op, norms[i % kinds.size()], p[4], p[5], eps[i], input, width);
    const bool has_part = i % kinds.size() > 0 && is_part(kinds[i % kinds.size() - 1]);
    if (!is_attention(kind)) {
      const int64_t rows = p[0] && p[0]->dim() == 2 ? p[0]->size(0) : 0;
      const bool joined = kind == SublayerKind::gated_feed_forward && !has_part;
      STD_TORCH_CHECK(!joined || rows % (2 * panel_columns()) == 0, op,
                      ": weight1 of a gated network must have a multiple of ", 2 * panel_columns(),
                      " rows");
      const int64_t hidden = joined ? rows / 2 : rows;
      sublayers.push_back({kind, linear("weight1", 0, rows, width, i),
                           linear("weight2", 1, width, hidden, i), norm});
      STD_TORCH_CHECK(p[0]->scalar_type() == p[2]->scalar_type(), op,
                      ": weight1 and weight2 must have one dtype");
      if (has_part) {
        sublayers.back().parts = {linear("gate_weight", 0, hidden, width, i - 1)};
        STD_TORCH_CHECK(parameters[6 * (i - 1)]->scalar_type() == p[0]->scalar_type(), op,
                        ": gate_weight and weight1 must have one dtype");
      }
    } else {
      const bool all = kind == SublayerKind::self_attention || projects_memory;
      const int64_t rows = has_part ? widths.key : widths.query + (all ? 2 * widths.key : 0);
      sublayers.push_back({kind, linear("in_weight", 0, rows, width, i),
                           linear("out_weight", 1, width, widths.query, i), norm});
      if (has_part)
        sublayers.back().parts = {linear("query_weight", 0, widths.query, width, i - 1),
                                  linear("key_weight", 1, widths.key, width, i - 1)};
    }
  }
  return sublayers;
}

// Whether all linear layers have 8-bit weights.
bool is_quantized(const Sublayer& layer) {
  return layer.first.scale && layer.second.scale &&
         std::all_of(layer.parts.begin(), layer.parts.end(),
                     [](const LinearParameters& linear) { return linear.scale.has_value(); });
}

// Whether attention may be in bfloat16 between these fp32 sub-layers: all of its projections are in
// 8 bits, and the CPU multiplies bfloat16.
bool attends_in_bf16(const std::vector<Sublayer>& sublayers) {
  return has_dot(current_isa(), Dot::bf16) &&
         std::all_of(sublayers.begin(), sublayers.end(),
                     [](const Sublayer& s) { return !is_attention(s.kind) || is_quantized(s); });
}

// Runs sub-layers on the rows of a tensor: y = norm(x + f(x)), or x + f(norm(x)) if norm_first.
class LayerRunner {
 public:
  LayerRunner(const Tensor& input, bool norm_first, int activation, AttentionWidths widths)
      : x_(as_contiguous(input)),
        rows_(row_count(x_)),
        width_(x_.size(x_.dim() - 1)),
        widths_(widths),
        type_(element_of(x_)),
        attention_type_(type_),
        norm_first_(norm_first),
        activation_(activation) {}

 protected:
  // In order. attend(sub-layer, index, projected, attended) computes attention: `projected` is the
  // output of the first linear layer, `attended` the input of the second.
  template <class Attend>
  Tensor run_sublayers(const std::vector<Sublayer>& sublayers, const Attend& attend) {
    Tensor output = empty_tensor_like(x_);
    if (rows_ * width_ == 0) return output;
    const size_t count = sublayers.size();
    choose_blocks(sublayers);
    void* other = count > 1 && blocks_ == 0 ? shared_bytes(kStreamSlot, stream_bytes()) : nullptr;
    if (norm_first_) normed_ = shared_bytes(kNormedSlot, stream_bytes());
    int64_t hidden_bytes = 0;
    for (const Sublayer& layer : sublayers) {
      if (is_attention(layer.kind)) {
        projected_ = shared_bytes(kProjectedSlot, rows_ * projected_row() * attention_element());
        attended_ = shared_bytes(kAttendedSlot, rows_ * widths_.query * attention_element());
      } else if (layer.kind == SublayerKind::gated_feed_forward) {
        const int64_t rows = blocks_ > 0 ? rows_ : std::min(rows_, kGatedRows);
        hidden_bytes = std::max(
            hidden_bytes, rows * layer.second.weight.size(1) * element_bytes(hidden_type(layer)));
      }
    }
    if (hidden_bytes > 0) hidden_ = shared_bytes(kGatedHiddenSlot, hidden_bytes);
    const void* x = x_.const_data_ptr();
    std::vector<Work> works;  // until the next attention
    for (size_t i = 0; i < count; ++i) {
      const Sublayer& layer = sublayers[i];
      // In place in blocks of rows, else in alternating buffers, so that the last one writes the
      // result.
      void* y = blocks_ > 0 || (count - i) % 2 == 1 ? output.mutable_data_ptr() : other;
      if (is_attention(layer.kind)) {
        works.push_back({Work::project, layer, x, projected_});
        run(works);
        attend(layer, i, projected_, attended_);
        works.push_back({Work::output, layer, x, y});
      } else {
        works.push_back({Work::network, layer, x, y});
      }
      x = y;
    }
    run(works);
    return output;
  }

  int64_t attention_element() const { return element_bytes(attention_type_); }
  // Columns of self-attention's queries, keys and values.
  int64_t projected_row() const { return widths_.query + 2 * widths_.key; }

  // Makes self-attention rotate queries and keys, heads of `size` channels. cos and sin:
  // (..., channels), with a row for each of the first rows of the input, then again for the next.
  void rotate_by(const char* op, const Tensor& cos, const Tensor& sin, int64_t size) {
    cos_ = as_contiguous(cos);
    sin_ = as_contiguous(sin);
    for (const Tensor* table : {&cos, &sin})
      STD_TORCH_CHECK(table->is_cpu() && table->dim() > 1 &&
                          (table->scalar_type() == ScalarType::Float ||
                           table->scalar_type() == x_.scalar_type()) &&
                          table->scalar_type() == cos.scalar_type() &&
                          table->sizes().equals(cos.sizes()),
                      op, ": cos and sin must be tables of float32 or input's dtype, of one shape");
    const int64_t rotated = cos.size(cos.dim() - 1), positions = row_count(*cos_);
    STD_TORCH_CHECK(rotated > 0 && rotated % 2 == 0 && rotated <= size, op,
                    ": cos must have an even number of columns, at most ", size);
    STD_TORCH_CHECK(positions > 0 && rows_ % positions == 0, op,
                    ": cos must have a row for each token, or for each of a sequence");
    rotation_ = {.table_type = element_of(*cos_),
                 .heads = (widths_.query + widths_.key) / size,
                 .size = size,
                 .rotated = rotated,
                 .cos = cos_->const_data_ptr(),
                 .sin = sin_->const_data_ptr(),
                 .positions = positions};
  }

  const Tensor x_;
  const int64_t rows_, width_;
  const AttentionWidths widths_;
  const Element type_;
  Element attention_type_;  // of attention's inputs and outputs

 private:
  // Work on each row of the stream x by itself.
  struct Work {
    enum { project, output, network } what;
    const Sublayer& layer;
    const void* x;  // before the sub-layer
    void* y;        // after it; for `project`: queries, keys and values, or only queries
  };

  int64_t row_unit() const {
    return TF_DISPATCH(int8_linear_kernels, type_, type_, type_)->row_unit;
  }

  int64_t stream_bytes() const { return rows_ * width_ * element_bytes(type_); }

  // With 8-bit weights only, a block of rows goes through all work between two attentions while it
  // is in the second-level cache. On AMX blocks are taller: it multiplies faster than weights
  // arrive from the third-level cache.
  void choose_blocks(const std::vector<Sublayer>& sublayers) {
    constexpr int64_t kRows = 56, kFewestRows = 8;
    const int64_t threads = torch::stable::get_num_threads();
    if (!std::all_of(sublayers.begin(), sublayers.end(), is_quantized)) return;
    // Few rows are divided by columns, as are those of too few tiles.
    if (threads > 1 && (rows_ < kFewestRows * threads || rows_ <= row_unit() * (threads - 1)))
      return;
    const int64_t rows = current_isa() == Isa::amx ? kMostRows : kRows;
    blocks_ = ((rows_ + rows - 1) / rows + threads - 1) / threads * threads;
  }

  void run(std::vector<Work>& works) const {
    const int64_t unit = row_unit();
    if (blocks_ == 0)
      for (const Work& work : works) run_rows(work, 0, rows_);
    else
      for_each_item(blocks_, [&](int64_t item) {
        const int64_t begin = row_of_part(rows_, item, blocks_, unit);
        const int64_t end = row_of_part(rows_, item + 1, blocks_, unit);
        if (begin < end)
          for (const Work& work : works) run_rows(work, begin, end);
      });
    works.clear();
  }

  // Runs the work on rows [begin, end): blocks on this thread, else all rows on all threads.
  void run_rows(const Work& work, int64_t begin, int64_t end) const {
    const Sublayer& layer = work.layer;
    const void* from = work.x;
    const bool normalizes = layer.norm.kind != kNoNorm;
    if (norm_first_ && normalizes && work.what != Work::output) {
      normalize(layer.norm, work.x, normed_, begin, end);
      from = normed_;
    }
    switch (work.what) {
      case Work::project: {
        const bool own = layer.kind == SublayerKind::self_attention;
        if (own && !layer.parts.empty()) {
          project_each(layer, from, work.y, begin, end);
        } else {
          const LinearParameters& queries = layer.parts.empty() ? layer.first : layer.parts[0];
          const PackedLinear first(queries, type_, rows_, 0, type_, attention_type_);
          const int64_t columns = own ? projected_row() : widths_.query;
          linear(first, first.arguments(from, rows_, nullptr, work.y, columns), begin, end);
        }
        if (own && rotation_.positions > 0) rotate(work.y, begin, end);
        return;
      }
      case Work::output: {
        const PackedLinear second(layer.second, type_, rows_, 1, attention_type_, type_);
        linear(second, second.arguments(attended_, rows_, work.x, work.y, width_), begin, end);
        break;
      }
      case Work::network:
        if (layer.kind == SublayerKind::feed_forward)
          feed_forward(layer, from, work.x, work.y, begin, end);
        else
          gated_feed_forward(layer, from, work.x, work.y, begin, end);
    }
    if (!norm_first_ && normalizes) normalize(layer.norm, work.y, work.y, begin, end);
  }

  void normalize(const Norm& norm, const void* x, void* y, int64_t begin, int64_t end) const {
    const LayerNormArgs args = norm.arguments(x_, x, y, width_);
    if (blocks_ > 0) return run_layer_norm_rows(args, begin, end);
    run_layer_norm(args, end);
  }

  void linear(const PackedLinear& linear, const LinearArgs& args, int64_t begin,
              int64_t end) const {
    if (blocks_ > 0) return linear.run_rows(args, begin, end);
    linear.run(args);
  }

  // Rotates the queries and keys of each row of `projected`.
  void rotate(void* projected, int64_t begin, int64_t end) const {
    RotationArgs args = rotation_;
    args.type = attention_type_;
    args.x = projected;
    args.x_stride = projected_row();
    if (blocks_ > 0) return TF_DISPATCH(rotate_rows, args, begin, end);
    parallel_for(begin, end, std::max<int64_t>(1, 8192 / width_),
                 [&](int64_t first, int64_t last) { TF_DISPATCH(rotate_rows, args, first, last); });
  }

  // Writes queries, keys and values of each row next to each other, from separate weights.
  void project_each(const Sublayer& layer, const void* x, void* y, int64_t begin,
                    int64_t end) const {
    const LinearParameters* each[] = {&layer.parts[0], &layer.parts[1], &layer.first};
    const int64_t y_stride = projected_row();
    x = offset_ptr(x, type_, begin * width_);
    char* to = static_cast<char*>(y) + begin * y_stride * attention_element();
    std::optional<PackedLinear> before;
    for (const LinearParameters* parameters : each) {
      const PackedLinear linear(*parameters, type_, rows_, 0, type_, attention_type_);
      const int64_t columns = parameters->weight.size(0);
      LinearArgs args = linear.arguments(x, end - begin, nullptr, to, columns);
      args.y_stride = y_stride;
      if (blocks_ > 0)
        linear.run_quantized(args, before ? &*before : nullptr);
      else
        linear.run(args);
      before.emplace(linear);
      to += columns * attention_element();
    }
  }

  // y = second(activation(first(x))) + residual
  void feed_forward(const Sublayer& layer, const void* x, const void* residual, void* y,
                    int64_t begin, int64_t end) const {
    const LinearParameters &first = layer.first, &second = layer.second;
    FeedForwardArgs args{.type = type_,
                         .x = x,
                         .bias1 = data_of(first.bias),
                         .bias2 = data_of(second.bias),
                         .y = y,
                         .m = rows_,
                         .k = width_,
                         .f = first.weight.size(0),
                         .n = width_,
                         .x_stride = width_,
                         .activation = activation_,
                         .residual = residual,
                         .residual_stride = width_,
                         .scale1 = first.scales(),
                         .scale2 = second.scales(),
                         .factors1 = floats_of(first.factors),
                         .factors2 = floats_of(second.factors)};
    if (!first.scale)
      return run_feed_forward(args, first.weight, first.packed, second.weight, second.packed,
                              kHiddenSlot);
    args.packed1 = first.packed->const_data_ptr();
    args.packed2 = second.packed->const_data_ptr();
    if (blocks_ == 0) return run_int8_feed_forward(args, kHiddenSlot);
    const FeedForwardKernels* kernels = TF_DISPATCH(int8_feed_forward_kernels, type_);
    kernels->rows(args, begin, end,
                  bytes_of(kernel_scratch(), kernels->scratch(args, end - begin)));
  }

  // y = second(activation(gate(x)) * up(x)) + residual
  void gated_feed_forward(const Sublayer& layer, const void* x, const void* residual, void* y,
                          int64_t begin, int64_t end) const {
    const int64_t f = layer.second.weight.size(1);
    const Element type = hidden_type(layer);
    const bool joined = layer.parts.empty();
    const PackedLinear values(layer.first, type_, rows_, 0, type_, type);
    const PackedLinear gates =
        joined ? values : PackedLinear(layer.parts[0], type_, rows_, kGateSlot, type_, type);
    const int64_t from = joined ? f : 0;
    const PackedLinear second(layer.second, type_, rows_, 1, type, type_);
    const int64_t step = blocks_ > 0 ? end - begin : kGatedRows;
    for (; begin < end; begin += step) {
      const int64_t rows = std::min(step, end - begin), place = begin * width_;
      char* hidden = hidden_ + (blocks_ > 0 ? begin * f * element_bytes(type) : 0);
      LinearArgs gate = gates.arguments(offset_ptr(x, type_, place), rows, nullptr, hidden, f);
      LinearArgs up = gate;
      // In int8 a coarse activation suffices, as in the network without gates.
      gate.activation = layer.first.scale ? coarse(activation_) : activation_;
      up.multiplies = true;
      const LinearArgs down = second.arguments(hidden, rows, offset_ptr(residual, type_, place),
                                               offset_ptr(y, type_, place), width_);
      if (blocks_ > 0) {
        gates.run_quantized(gate, nullptr);
        values.run_quantized(up, &gates, from);
        second.run_rows(down, 0, rows);
      } else {
        gates.run(gate);
        values.run(up, from);
        second.run(down);
      }
    }
  }

  // Type of the values between the two linear layers of a gated network.
  Element hidden_type(const Sublayer& layer) const {
    return layer.first.scale && type_ == Element::float32 ? Element::bfloat16 : type_;
  }

  // Rows that pass through a gated network at a time, so that the hidden values fit in the
  // second-level cache, and the weights are read seldom.
  static constexpr int64_t kGatedRows = 1024;

  MaybeTensor cos_, sin_;
  RotationArgs rotation_;  // for queries and keys of self-attention; positions 0: none
  bool norm_first_;
  int activation_;
  int64_t blocks_ = 0;  // 0: each work on all rows
  char *normed_ = nullptr, *projected_ = nullptr, *attended_ = nullptr, *hidden_ = nullptr;
};

constexpr const char *kOp = "layers", *kDecodeOp = "decode_stack";

// Arguments of an attention except its tensors: shape, mask and sequence starts.
struct AttentionCall {
  AttentionArgs args{};
  std::vector<int64_t> query_starts, key_starts;
};

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
      : LayerRunner(input, norm_first, activation, widths_of(input)),
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

  // All heads of a row together have as many columns as the input.
  static AttentionWidths widths_of(const Tensor& input) {
    const int64_t width = input.size(input.dim() - 1);
    return {width, width};
  }

  void set_masks(const MaybeTensor& mask, bool is_causal, const MaybeTensor& memory_mask,
                 bool memory_is_causal) {
    set_attention_mask(own_, mask, is_causal);
    if (memory_) set_attention_mask(cross_, memory_mask, memory_is_causal);
  }

  // cos and sin: (1 or B, T, channels), or (rows, channels) if ragged.
  void set_rotation(const MaybeTensor& cos, const MaybeTensor& sin) {
    STD_TORCH_CHECK(cos.has_value() == sin.has_value(), kOp, ": cos and sin come in pairs");
    if (!cos) return;
    STD_TORCH_CHECK(batch_first_, kOp, ": a rotation requires batch_first");
    const int64_t dims = x_.dim();
    STD_TORCH_CHECK(cos->dim() == dims && cos->size(dims - 2) == x_.size(dims - 2) &&
                        (ragged_ || cos->size(0) == 1 || cos->size(0) == x_.size(0)),
                    kOp, ": cos must have ", dims, " dimensions, and a row for each token");
    rotate_by(kOp, *cos, *sin, own_.args.size);
  }

  Tensor run(const std::vector<Sublayer>& sublayers) {
    if (type_ == Element::float32 && attends_in_bf16(sublayers))
      attention_type_ = Element::bfloat16;
    return run_sublayers(
        sublayers, [&](const Sublayer& layer, size_t, const char* projected, void* attended) {
          if (layer.kind == SublayerKind::cross_attention)
            return attend(cross_, projected, width_, keys_of_memory(layer), 2 * width_, attended);
          // Queries, keys and values of each row are next to each other.
          attend(own_, projected, 3 * width_, projected + width_ * attention_element(), 3 * width_,
                 attended);
        });
  }

 private:
  void set_shape(AttentionCall& call, int64_t heads, const MaybeTensor& starts,
                 const MaybeTensor& key_starts, const Tensor& source) const {
    AttentionArgs& args = call.args;
    if (ragged_) {
      const int64_t keys = source.size(0);
      call.query_starts = read_starts(starts, rows_, rows_);
      call.key_starts = read_starts(key_starts, keys, keys);
      STD_TORCH_CHECK(call.query_starts.size() == call.key_starts.size(), kOp,
                      ": starts come in pairs");
      STD_TORCH_CHECK(call.query_starts.back() == rows_ && call.key_starts.back() == keys, kOp,
                      ": starts must go to the number of rows");
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
    args.heads = args.key_heads = heads;
    args.size = args.value_size = width_ / heads;
    args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(args.size));
  }

  void set_attention_mask(AttentionCall& call, const MaybeTensor& mask, bool is_causal) const {
    AttentionArgs& args = call.args;
    args.causal = is_causal;
    set_mask(args, mask, {args.batch, args.heads, args.queries, args.keys}, x_.scalar_type());
  }

  // Projects the memory to keys and values, those of each row next to each other.
  const char* keys_of_memory(const Sublayer& layer) const {
    char* keys = shared_bytes(kMemorySlot, 2 * memory_rows_ * width_ * attention_element());
    const auto project = [&](const LinearParameters& in, char* to, int64_t from, int64_t n) {
      const PackedLinear linear(in, type_, memory_rows_, 0, type_, attention_type_);
      LinearArgs args = linear.arguments(memory_->const_data_ptr(), memory_rows_, nullptr, to, n);
      args.y_stride = 2 * width_;
      linear.run(args, from);
    };
    if (layer.parts.empty()) {
      project(layer.first, keys, width_, 2 * width_);
    } else {
      project(layer.parts[1], keys, 0, width_);
      project(layer.first, keys + width_ * attention_element(), 0, width_);
    }
    return keys;
  }

  // Rows of queries are query_row elements apart; rows of keys, key_row apart, are followed by the
  // values.
  void attend(const AttentionCall& call, const void* queries, int64_t query_row, const char* keys,
              int64_t key_row, void* attended) const {
    AttentionArgs args = call.args;
    args.type = attention_type_;
    args.query = queries;
    args.key = keys;
    args.value = keys + width_ * attention_element();
    args.output = attended;
    const auto strides = [&](Index* stride, int64_t row, int64_t length) {
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
  }

  MaybeTensor memory_;
  bool ragged_, batch_first_;
  int64_t memory_rows_ = 0;
  AttentionCall own_, cross_;
};

std::vector<SublayerKind> checked_kinds(const char* op, const std::vector<int64_t>& kinds,
                                        const std::vector<int64_t>& norms) {
  for (const int64_t norm : norms)
    STD_TORCH_CHECK(norm >= kNoNorm && norm < kNormKinds, op, ": there is no norm of kind ", norm);
  std::vector<SublayerKind> each;
  for (const int64_t kind : kinds) {
    STD_TORCH_CHECK(kind >= 0 && kind < kSublayerKinds, op, ": there is no sub-layer of kind ",
                    kind);
    each.push_back(static_cast<SublayerKind>(kind));
  }
  return each;
}

Tensor layers(Tensor input, MaybeTensor memory, std::vector<int64_t> kinds,
              std::vector<MaybeTensor> parameters, std::vector<MaybeTensor> packed,
              std::vector<MaybeTensor> scales, std::vector<double> eps, bool norm_first,
              std::vector<int64_t> norms, int64_t heads, int64_t activation, bool batch_first,
              MaybeTensor mask, bool is_causal, MaybeTensor memory_mask, bool memory_is_causal,
              MaybeTensor starts, MaybeTensor memory_starts, MaybeTensor cos, MaybeTensor sin) {
  checked_float_type(kOp, "input", input);
  const std::vector<SublayerKind> each = checked_kinds(kOp, kinds, norms);
  for (const SublayerKind kind : each)
    STD_TORCH_CHECK(kind != SublayerKind::cross_attention || memory.has_value(), kOp,
                    ": attention to a memory needs one");
  Layers run(input, memory, norm_first, heads, checked_activation(kOp, activation), batch_first,
             starts, memory_starts);
  run.set_masks(mask, is_causal, memory_mask, memory_is_causal);
  run.set_rotation(cos, sin);
  Tensor output = run.run(read_sublayers(kOp, each, parameters, packed, scales, eps, norms, input,
                                         Layers::widths_of(input), true));
  trim_shared_scratch();
  return output;
}

// Cached keys and values (R, H, positions, D), with their strides.
struct KeysAndValues {
  char *keys, *values;
  int64_t rows, heads, positions, size, stride[3];  // strides in elements; D is adjacent

  // `both`: (2, R, H, positions, D), or item `layer` of (layers, 2, R, H, positions, D) is used.
  KeysAndValues(const Tensor& both, void* data, int64_t layer) : keys(static_cast<char*>(data)) {
    const int64_t first = both.dim() - 5, element = static_cast<int64_t>(both.element_size());
    if (first > 0) keys += layer * both.stride(0) * element;
    values = keys + both.stride(first) * element;
    rows = both.size(first + 1);
    heads = both.size(first + 2);
    positions = both.size(first + 3);
    size = both.size(first + 4);
    for (int d = 0; d < 3; ++d) stride[d] = both.stride(first + 1 + d);
  }
};

class Step : LayerRunner {
 public:
  // own_mask: of self-attention, (1 or R, 1 or H, T, positions); else new tokens attend causally.
  Step(const Tensor& input, bool norm_first, int activation, AttentionWidths widths, float scale,
       MaybeTensor own_mask)
      : LayerRunner(input, norm_first, activation, widths), scale_(scale), own_mask_(own_mask) {}

  using LayerRunner::rotate_by;

  // `layers`: number of layers that `sublayers` form. `start`: number of previous tokens.
  Tensor run(const std::vector<Sublayer>& sublayers, size_t layers, Tensor& cache, int64_t start,
             const std::vector<Tensor>& memories, const MaybeTensor& mask, const int64_t* lengths) {
    void* cached = cache.mutable_data_ptr();
    const size_t each = sublayers.size() / layers;
    attention_type_ = element_of(cache);
    return run_sublayers(sublayers, [&](const Sublayer& sublayer, size_t i, const char* projected,
                                        void* attended) {
      const size_t layer = i / each;
      if (sublayer.kind == SublayerKind::self_attention)
        return self_attention(projected, KeysAndValues(cache, cached, static_cast<int64_t>(layer)),
                              start, attended);
      const Tensor& memory = memories[layer];
      const KeysAndValues at(memory, const_cast<void*>(memory.const_data_ptr()), 0);
      attend(at, at.positions, projected, widths_.query, false, mask, lengths, attended);
    });
  }

 private:
  // Appends the keys and values of the new tokens to those of the previous ones.
  void self_attention(const char* projected, const KeysAndValues& cache, int64_t start,
                      void* attended) const {
    append(projected, cache, start);
    const int64_t length = rows_ / cache.rows;
    attend(cache, start + length, projected, projected_row(), length > 1 && !own_mask_, own_mask_,
           nullptr, attended);
  }

  // `projected` holds queries, keys and values of each token next to each other.
  void append(const char* projected, const KeysAndValues& cache, int64_t start) const {
    const int64_t length = rows_ / cache.rows, each = length * cache.size;
    const int64_t element = attention_element(), row = projected_row();
    const size_t bytes = static_cast<size_t>(cache.size * element);
    parallel_for(
        0, cache.rows * cache.heads, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, each)),
        [&](int64_t begin, int64_t end) {
          for (int64_t item = begin; item < end; ++item) {
            const int64_t r = item / cache.heads, head = item % cache.heads;
            const char* from =
                projected + (r * length * row + widths_.query + head * cache.size) * element;
            for (int64_t t = 0; t < length; ++t, from += row * element) {
              const int64_t place =
                  (r * cache.stride[0] + head * cache.stride[1] + (start + t) * cache.stride[2]) *
                  element;
              std::memcpy(cache.keys + place, from, bytes);
              std::memcpy(cache.values + place, from + widths_.key * element, bytes);
            }
          }
        });
  }

  // Attention of the queries, query_row elements apart, to the first `positions` keys.
  void attend(const KeysAndValues& at, int64_t positions, const void* query, int64_t query_row,
              bool causal, const MaybeTensor& mask, const int64_t* lengths, void* attended) const {
    AttentionArgs args{};
    args.type = attention_type_;
    args.query = query;
    args.key = at.keys;
    args.value = at.values;
    args.output = attended;
    args.batch = at.rows;
    args.heads = widths_.query / at.size;
    args.key_heads = at.heads;
    args.queries = rows_ / at.rows;
    args.keys = positions;
    args.size = args.value_size = at.size;
    args.scale = scale_;
    args.causal = causal;
    args.key_lengths = lengths;
    const int64_t query_stride[] = {args.queries * query_row, at.size, query_row, 1};
    const int64_t output_stride[] = {args.queries * widths_.query, at.size, widths_.query};
    for (int d = 0; d < 4; ++d) {
      args.query_stride[d] = query_stride[d];
      args.key_stride[d] = args.value_stride[d] = d == 3 ? 1 : at.stride[d];
      if (d < 3) args.output_stride[d] = output_stride[d];
    }
    set_mask(args, mask, {at.rows, args.heads, args.queries, positions}, x_.scalar_type());
    run_attention(args);
  }

  const float scale_;
  const MaybeTensor own_mask_;
};

void check_cached(const char* name, const Tensor& tensor, const Tensor& input, ScalarType type,
                  int64_t dims) {
  const bool fits = tensor.is_cpu() && tensor.scalar_type() == type && tensor.dim() == dims &&
                    tensor.size(dims - 5) == 2 && tensor.size(dims - 4) > 0 &&
                    tensor.stride(dims - 1) == 1;
  STD_TORCH_CHECK(fits, kDecodeOp, ": ", name, " must be (", dims == 6 ? "layers, " : "",
                  "2, R, H, positions, D) of input's dtype, D adjacent");
  STD_TORCH_CHECK(input.size(0) % tensor.size(dims - 4) == 0, kDecodeOp, ": input does not fit ",
                  name);
}

// heads: number of heads of queries; those of keys and values are the cache's.
Tensor decode_stack(Tensor input, Tensor cache, int64_t start, std::vector<Tensor> memories,
                    std::vector<int64_t> kinds, std::vector<MaybeTensor> parameters,
                    std::vector<MaybeTensor> packed, std::vector<MaybeTensor> scales,
                    std::vector<double> eps, bool norm_first, std::vector<int64_t> norms,
                    int64_t heads, double scale, int64_t activation, MaybeTensor mask,
                    MaybeTensor key_lengths, MaybeTensor own_mask, MaybeTensor cos,
                    MaybeTensor sin) {
  checked_float_type(kDecodeOp, "input", input);
  STD_TORCH_CHECK(input.dim() == 2, kDecodeOp, ": input must be (rows, width)");
  const bool lowp_cache = input.scalar_type() == ScalarType::Float && is_reduced_float(cache);
  check_cached("cache", cache, input, lowp_cache ? ScalarType::BFloat16 : input.scalar_type(), 6);
  const int64_t layers = cache.size(0), rows = input.size(0), size = cache.size(5);
  STD_TORCH_CHECK(layers > 0, kDecodeOp, ": the cache has no layers");
  STD_TORCH_CHECK(cache.size(3) > 0 && heads > 0 && heads % cache.size(3) == 0, kDecodeOp,
                  ": the cache's ", cache.size(3), " heads must divide the ", heads, " of queries");
  const AttentionWidths widths{heads * size, cache.size(3) * size};
  const bool crossed = !memories.empty();
  STD_TORCH_CHECK(!crossed || static_cast<int64_t>(memories.size()) == layers, kDecodeOp,
                  ": there must be a memory for each of ", layers, " layers, or none");
  const int64_t length = rows / cache.size(2);
  STD_TORCH_CHECK(start >= 0 && length <= cache.size(4) && start <= cache.size(4) - length,
                  kDecodeOp, ": the cache has ", cache.size(4), " positions");
  STD_TORCH_CHECK(length <= 1 || start == 0, kDecodeOp,
                  ": several tokens at once must be the first");
  const std::vector<SublayerKind> each = checked_kinds(kDecodeOp, kinds, norms);
  STD_TORCH_CHECK(eps.size() == each.size() * static_cast<size_t>(layers), kDecodeOp,
                  ": there must be ", each.size(), " sub-layers for each of ", layers, " layers");
  const auto count = [&](SublayerKind kind) { return std::count(each.begin(), each.end(), kind); };
  STD_TORCH_CHECK(count(SublayerKind::self_attention) == 1 &&
                      count(SublayerKind::cross_attention) == (crossed ? 1 : 0),
                  kDecodeOp,
                  ": each layer must attend to its cache, and to its memory if there is ",
                  "one, once");
  const std::vector<Sublayer> sublayers =
      read_sublayers(kDecodeOp, each, parameters, packed, scales, eps, norms, input, widths, false);
  STD_TORCH_CHECK(!lowp_cache || attends_in_bf16(sublayers), kDecodeOp,
                  ": a bfloat16 cache of a float32 input requires int8 projections and a CPU with ",
                  "bfloat16 dot products");
  for (const Tensor& memory : memories) {
    check_cached("memory", memory, input, cache.scalar_type(), 5);
    STD_TORCH_CHECK(memory.size(2) == heads && memory.size(4) == size, kDecodeOp,
                    ": memory must have ", heads, " heads of ", size, " channels");
    STD_TORCH_CHECK(memory.sizes().equals(memories[0].sizes()), kDecodeOp,
                    ": the memories differ in shape");
  }
  std::vector<int64_t> lengths;
  if (crossed) lengths = to_int64("key_lengths", key_lengths, memories[0].size(1));
  Step step(input, norm_first, checked_activation(kDecodeOp, activation), widths,
            static_cast<float>(scale), own_mask);
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), kDecodeOp, ": cos and sin come in pairs");
  if (cos) step.rotate_by(kDecodeOp, *cos, *sin, size);
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
      "Tensor?[] packed, Tensor?[] scales, float[] eps, bool norm_first, int[] norms, int heads, "
      "int activation, bool batch_first, Tensor? mask, bool is_causal, Tensor? memory_mask, "
      "bool memory_is_causal, Tensor? starts, Tensor? memory_starts, Tensor? cos, "
      "Tensor? sin) -> Tensor");
  m.def(
      "decode_stack.cpu(Tensor input, Tensor(a!) cache, int start, Tensor[] memories, int[] kinds, "
      "Tensor?[] parameters, Tensor?[] packed, Tensor?[] scales, float[] eps, bool norm_first, "
      "int[] norms, int heads, float scale, int activation, Tensor? mask, Tensor? key_lengths, "
      "Tensor? own_mask, Tensor? cos, Tensor? sin) -> Tensor");
  m.def("uninitialized.cpu(Tensor like, int[] sizes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("layers.cpu", TF_BOX(&tf::layers));
  m.impl("decode_stack.cpu", TF_BOX(&tf::decode_stack));
  m.impl("uninitialized.cpu", TF_BOX(&tf::uninitialized));
}
