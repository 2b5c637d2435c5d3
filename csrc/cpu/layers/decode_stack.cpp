// One decoding step through a whole stack of layers in one call: the new tokens attend to
// themselves and to all previous tokens, whose keys and values are cached, and to the encoder
// output, if any; the feed-forward network follows. Intermediate results are in this thread's
// scratch.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/core/box.h"
#include "cpu/layers/layer_runner.h"

namespace tf {
namespace {

constexpr const char* kOp = "decode_stack";

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

class Step {
 public:
  Step(const Tensor& input, bool norm_first, int activation)
      : x_(input),
        rows_(input.size(0)),
        width_(input.size(1)),
        element_(static_cast<int64_t>(input.element_size())),
        norm_first_(norm_first),
        activation_(activation) {}

  // Appends the keys and values of the new tokens to those of the `start` previous ones.
  void self_attention(const Sublayer& layer, const KeysAndValues& cache, int64_t start,
                      const void* x, void* y) const {
    run(layer.norm, x, y, [&](const void* from, const void* residual) {
      char* projected = shared_bytes(kProjectedSlot, rows_ * 3 * width_ * element_);
      PackedLinear(layer.first, rows_, 0).run(from, rows_, nullptr, projected);
      append(projected, cache, start);
      const int64_t length = rows_ / cache.rows;
      void* attended =
          attend(cache, start + length, projected, 3 * width_, length > 1, std::nullopt, nullptr);
      PackedLinear(layer.second, rows_, 1).run(attended, rows_, residual, y);
    });
  }

  void cross_attention(const Sublayer& layer, const KeysAndValues& memory, const MaybeTensor& mask,
                       const int64_t* lengths, const void* x, void* y) const {
    run(layer.norm, x, y, [&](const void* from, const void* residual) {
      char* projected = shared_bytes(kProjectedSlot, rows_ * width_ * element_);
      PackedLinear(layer.first, rows_, 0).run(from, rows_, nullptr, projected);
      void* attended = attend(memory, memory.places, projected, width_, false, mask, lengths);
      PackedLinear(layer.second, rows_, 1).run(attended, rows_, residual, y);
    });
  }

  void feed_forward(const Sublayer& layer, const void* x, void* y) const {
    run(layer.norm, x, y, [&](const void* from, const void* residual) {
      run_feed_forward(layer.first, layer.second, activation_, from, rows_, residual, y);
    });
  }

 private:
  template <class F>
  void run(const Norm& norm, const void* x, void* y, const F& f) const {
    run_sublayer(x_, norm, norm_first_, x, y, rows_, width_, f);
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
  void* attend(const KeysAndValues& at, int64_t places, const void* query, int64_t query_row,
               bool causal, const MaybeTensor& mask, const int64_t* lengths) const {
    void* attended = shared_bytes(kAttendedSlot, rows_ * width_ * element_);
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

  const Tensor& x_;
  int64_t rows_, width_, element_;
  bool norm_first_;
  int activation_;
};

void check_places(const char* name, const Tensor& tensor, const Tensor& input, int64_t dims) {
  const bool fits = tensor.is_cpu() && tensor.scalar_type() == input.scalar_type() &&
                    tensor.dim() == dims && tensor.size(dims - 5) == 2 &&
                    tensor.size(dims - 4) > 0 && tensor.stride(dims - 1) == 1;
  STD_TORCH_CHECK(fits, kOp, ": ", name, " must be (", dims == 6 ? "layers, " : "",
                  "2, R, H, places, D) of input's dtype, D adjacent");
  STD_TORCH_CHECK(tensor.size(dims - 3) * tensor.size(dims - 1) == input.size(1) &&
                      input.size(0) % tensor.size(dims - 4) == 0,
                  kOp, ": input does not fit ", name);
}

Tensor decode_stack(Tensor input, Tensor cache, int64_t start, std::vector<Tensor> memories,
                    std::vector<MaybeTensor> parameters, std::vector<MaybeTensor> packed,
                    std::vector<double> eps, bool norm_first, int64_t activation, MaybeTensor mask,
                    MaybeTensor key_lengths) {
  check_block_input(kOp, input);
  STD_TORCH_CHECK(input.dim() == 2, kOp, ": input must be (rows, width)");
  check_places("cache", cache, input, 6);
  const int64_t layers = cache.size(0), width = input.size(1), rows = input.size(0);
  STD_TORCH_CHECK(layers > 0, kOp, ": the cache has no layers");
  const bool crossed = !memories.empty();
  STD_TORCH_CHECK(!crossed || static_cast<int64_t>(memories.size()) == layers, kOp,
                  ": there must be a memory for each of ", layers, " layers, or none");
  const int64_t length = rows / cache.size(2);
  STD_TORCH_CHECK(start >= 0 && length <= cache.size(4) && start <= cache.size(4) - length, kOp,
                  ": the cache has ", cache.size(4), " places");
  STD_TORCH_CHECK(length <= 1 || start == 0, kOp, ": several tokens at once must be the first");
  std::vector<SublayerKind> kinds{SublayerKind::self_attention, SublayerKind::feed_forward};
  if (crossed) kinds.insert(kinds.begin() + 1, SublayerKind::cross_attention);
  STD_TORCH_CHECK(eps.size() == kinds.size() * static_cast<size_t>(layers), kOp, ": there must be ",
                  kinds.size(), " sub-layers for each of ", layers, " layers");
  const std::vector<Sublayer> sublayers =
      read_sublayers(kOp, kinds, parameters, packed, eps, input, 1);
  for (const Tensor& memory : memories) {
    check_places("memory", memory, input, 5);
    STD_TORCH_CHECK(memory.sizes().equals(memories[0].sizes()), kOp,
                    ": the memories differ in shape");
  }
  std::vector<int64_t> lengths;
  if (crossed) lengths = to_int64("key_lengths", key_lengths, memories[0].size(1));
  const Tensor x = as_contiguous(input);
  Tensor output = empty_tensor_like(x);
  if (rows * width == 0) return output;

  const Step step(x, norm_first, checked_activation(kOp, activation));
  void* cached = cache.mutable_data_ptr();
  run_sublayers(sublayers, x.const_data_ptr(), output.mutable_data_ptr(),
                rows * width * static_cast<int64_t>(x.element_size()),
                [&](const Sublayer& sublayer, size_t i, const void* from, void* to) {
                  const size_t layer = i / kinds.size();
                  if (sublayer.kind == SublayerKind::self_attention) {
                    const KeysAndValues at(cache, cached, static_cast<int64_t>(layer));
                    step.self_attention(sublayer, at, start, from, to);
                  } else if (sublayer.kind == SublayerKind::cross_attention) {
                    const Tensor& memory = memories[layer];
                    const KeysAndValues at(memory, const_cast<void*>(memory.const_data_ptr()), 0);
                    step.cross_attention(sublayer, at, mask, key_lengths ? lengths.data() : nullptr,
                                         from, to);
                  } else {
                    step.feed_forward(sublayer, from, to);
                  }
                });
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
      "cpu_decode_stack(Tensor input, Tensor(a!) cache, int start, Tensor[] memories, "
      "Tensor?[] parameters, Tensor?[] packed, float[] eps, bool norm_first, int activation, "
      "Tensor? mask, Tensor? key_lengths) -> Tensor");
  m.def("cpu_uninitialized(Tensor like, int[] sizes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_decode_stack", TF_BOX(&tf::decode_stack));
  m.impl("cpu_uninitialized", TF_BOX(&tf::uninitialized));
}
