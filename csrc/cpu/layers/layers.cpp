// Transformer layers in one call, for inference: a whole stack, one layer, or a single sub-layer
// with its projections, residual connection and norm. Intermediate results are in this thread's
// scratch, so a call costs one dispatch and only the result's memory.
#include <torch/csrc/stable/library.h>

#include "cpu/core/box.h"
#include "cpu/layers/layer_runner.h"

namespace tf {
namespace {

constexpr const char* kOp = "layers";

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

class Layers {
 public:
  Layers(const Tensor& input, const MaybeTensor& memory, bool norm_first, int64_t heads,
         int activation, bool batch_first, const MaybeTensor& starts,
         const MaybeTensor& memory_starts)
      : x_(as_contiguous(input)),
        memory_(as_contiguous(memory)),
        ragged_(starts.has_value()),
        batch_first_(batch_first || ragged_),
        norm_first_(norm_first),
        activation_(activation),
        element_(static_cast<int64_t>(x_.element_size())) {
    const int64_t dims = ragged_ ? 2 : 3;
    STD_TORCH_CHECK(x_.dim() == dims, kOp, ": input must have ", dims, " dimensions");
    width_ = x_.size(dims - 1);
    rows_ = row_count(x_);
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
    Tensor output = empty_tensor_like(x_);
    if (rows_ * width_ == 0) return output;
    run_sublayers(sublayers, x_.const_data_ptr(), output.mutable_data_ptr(),
                  rows_ * width_ * element_,
                  [&](const Sublayer& layer, size_t, const void* from, void* to) {
                    run_sublayer(x_, layer.norm, norm_first_, from, to, rows_, width_,
                                 [&](const void* entered, const void* residual) {
                                   run_one(layer, entered, residual, to);
                                 });
                  });
    return output;
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

  void run_one(const Sublayer& layer, const void* from, const void* residual, void* to) const {
    if (layer.kind == SublayerKind::feed_forward)
      return run_feed_forward(layer.first, layer.second, activation_, from, rows_, residual, to);
    const void* attended = layer.kind == SublayerKind::self_attention
                               ? self_attention(layer.first, from)
                               : cross_attention(layer.first, from);
    PackedLinear(layer.second, rows_, 1).run(attended, rows_, residual, to);
  }

  // Queries, keys and values of each row are next to each other.
  const void* self_attention(const LinearParameters& in, const void* from) const {
    char* projected = shared_bytes(kProjectedSlot, rows_ * 3 * width_ * element_);
    PackedLinear(in, rows_, 0).run(from, rows_, nullptr, projected);
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
    void* attended = shared_bytes(kAttendedSlot, rows_ * width_ * element_);
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

  Tensor x_;
  MaybeTensor memory_;
  bool ragged_, batch_first_, norm_first_;
  int activation_;
  int64_t element_, width_ = 0, rows_ = 0, memory_rows_ = 0;
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

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_layers(Tensor input, Tensor? memory, int[] kinds, Tensor?[] parameters, "
      "Tensor?[] packed, float[] eps, bool norm_first, int heads, int activation, "
      "bool batch_first, Tensor? mask, bool is_causal, Tensor? memory_mask, "
      "bool memory_is_causal, Tensor? starts, Tensor? memory_starts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) { m.impl("cpu_layers", TF_BOX(&tf::layers)); }
