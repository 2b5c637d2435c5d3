// One step of decoding through an attention sub-layer: the newest tokens attend to cached keys and
// values, with projections, residual connection and norm, in one call.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/attention_host.h"
#include "cpu/block_host.h"
#include "cpu/half_ops.h"

namespace tf {
namespace {

using MaybeTensor = std::optional<Tensor>;

// A linear map's parameters, and what of it is kept.
struct Projection {
  Tensor weight;
  MaybeTensor packed, bias;

  Projection(const char* name, Tensor w, MaybeTensor p, MaybeTensor b, const Tensor& input,
             int64_t n, int64_t k)
      : weight(w), packed(p), bias(as_contiguous(b)) {
    STD_TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == input.scalar_type() &&
                        weight.dim() == 2 && weight.size(0) == n && weight.size(1) == k,
                    "decode_attention: ", name, " must be (", n, ", ", k, ") of input's dtype");
    STD_TORCH_CHECK(
        !bias ||
            (bias->is_cpu() && bias->scalar_type() == input.scalar_type() && bias->numel() == n),
        "decode_attention: the bias of ", name, " must have ", n, " elements of input's dtype");
  }

  // y = x W^T + bias + residual, x (m, k)
  void run(const void* x, int64_t m, const void* residual, void* y, int slot) const {
    if (is_half(weight)) return half::linear_into(x, m, weight, packed, bias, residual, y, slot);
    const int64_t n = weight.size(0), k = weight.size(1);
    run_linear({static_cast<const float*>(x), nullptr, optional_data(bias),
                static_cast<const float*>(residual), static_cast<float*>(y), m, k, n, k, n, n, 0},
               weight, packed, slot);
  }
};

// Norm over the rows of x (rows, columns).
struct AnyNorm {
  MaybeTensor weight, bias;
  double eps;

  void run(const Tensor& like, const void* x, void* y, int64_t rows, int64_t columns) const {
    if (is_half(like)) {
      half::layer_norm_into(like, x, rows, columns, weight, bias, eps, y);
    } else {
      Norm(weight, bias, eps, columns)
          .run(static_cast<const float*>(x), static_cast<float*>(y), rows, columns);
    }
  }
};

void check_norm(const MaybeTensor& parameter, const Tensor& input, int64_t columns) {
  STD_TORCH_CHECK(
      !parameter || (parameter->is_cpu() && parameter->numel() == columns &&
                     (parameter->scalar_type() == input.scalar_type() ||
                      (is_half(input) && parameter->scalar_type() == ScalarType::Float))),
      "decode_attention: the norm must have ", columns, " elements of input's dtype");
}

char* bytes_of(Scratch& scratch, int64_t bytes) {
  return reinterpret_cast<char*>(scratch.floats((bytes + 3) / static_cast<int64_t>(sizeof(float))));
}

void set_places(AttentionArgs& args, const void* q, const void* k, const void* v, void* o,
                Element) {
  args.query = static_cast<const float*>(q);
  args.key = static_cast<const float*>(k);
  args.value = static_cast<const float*>(v);
  args.output = static_cast<float*>(o);
}

void set_places(TypedAttentionArgs& args, const void* q, const void* k, const void* v, void* o,
                Element type) {
  args.type = type;
  args.query = q;
  args.key = k;
  args.value = v;
  args.output = o;
}

struct Sizes {
  int64_t rows, length, heads, size, width;  // rows: of the cache; length: queries each
};

// Attention of (rows * length, query_row) queries to `places` keys of the cache.
template <class Args>
void attend(const Sizes& is, const Tensor& keys, const Tensor& values, int64_t places,
            const void* query, int64_t query_row, void* attended, bool causal_tail,
            const MaybeTensor& mask, const MaybeTensor& key_lengths) {
  Args args{};
  set_places(args, query, keys.const_data_ptr(), values.const_data_ptr(), attended,
             element_of(keys));
  args.batch = is.rows;
  args.heads = args.key_heads = is.heads;
  args.queries = is.length;
  args.keys = places;
  args.size = args.value_size = is.size;
  args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(is.size));
  args.causal = causal_tail;
  const int64_t strides[] = {is.length * query_row, is.size, query_row, 1};
  const int64_t out[] = {is.length * is.width, is.size, is.width};
  for (int d = 0; d < 4; ++d) {
    args.query_stride[d] = strides[d];
    args.key_stride[d] = d == 3 ? 1 : keys.stride(d);
    args.value_stride[d] = d == 3 ? 1 : values.stride(d);
    if (d < 3) args.output_stride[d] = out[d];
  }
  set_mask(args, mask, {is.rows, is.heads, is.length, places}, keys.scalar_type());
  const std::vector<int64_t> lengths = to_int64("key_lengths", key_lengths, is.rows);
  if (key_lengths) args.key_lengths = lengths.data();
  if constexpr (std::is_same_v<Args, AttentionArgs>) {
    run_attention(args);
  } else {
    half::run_attention(args);
  }
}

// Writes the new keys or values, in rows of `row` bytes, into the cache from place `start` on.
void append(const Sizes& is, const char* from, int64_t row, Tensor& cache, int64_t start) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t each = is.length * is.size;
  torch::stable::parallel_for(
      0, is.rows * is.heads, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, each)),
      [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t r = item / is.heads, head = item % is.heads;
          for (int64_t t = 0; t < is.length; ++t)
            std::memcpy(to + (r * cache.stride(0) + head * cache.stride(1) +
                              (start + t) * cache.stride(2)) *
                                 element,
                        from + (r * is.length + t) * row + head * is.size * element,
                        static_cast<size_t>(is.size * element));
        }
      });
}

Tensor decode_attention(Tensor input, Tensor keys, Tensor values, std::optional<int64_t> start,
                        Tensor in_weight, MaybeTensor in_packed, MaybeTensor in_bias,
                        Tensor out_weight, MaybeTensor out_packed, MaybeTensor out_bias,
                        MaybeTensor norm_weight, MaybeTensor norm_bias, double eps, bool norm_first,
                        MaybeTensor mask, MaybeTensor key_lengths) {
  const char* op = "decode_attention";
  const ScalarType type = input.scalar_type();
  STD_TORCH_CHECK(input.is_cpu() && (type == ScalarType::Float || is_half(input)), op,
                  ": input must be float32, bfloat16 or float16, and on the CPU");
  STD_TORCH_CHECK(input.dim() == 2, op, ": input must be (rows, width)");
  for (const Tensor* cache : {&keys, &values})
    STD_TORCH_CHECK(cache->is_cpu() && cache->scalar_type() == type && cache->dim() == 4 &&
                        cache->stride(3) == 1 && cache->size(0) > 0 &&
                        cache->sizes().equals(keys.sizes()),
                    op, ": keys and values must be (R, H, places, D) of input's dtype");
  const Tensor x = as_contiguous(input);
  Sizes is{keys.size(0), 0, keys.size(1), keys.size(3), x.size(1)};
  is.length = x.size(0) / is.rows;
  STD_TORCH_CHECK(is.length * is.rows == x.size(0) && is.heads * is.size == is.width, op,
                  ": input does not fit the keys");
  const int64_t parts = start ? 3 : 1, width = is.width, rows = x.size(0);
  const Projection in("in_weight", in_weight, in_packed, in_bias, x, parts * width, width);
  const Projection out("out_weight", out_weight, out_packed, out_bias, x, width, width);
  check_norm(norm_weight, x, width);
  check_norm(norm_bias, x, width);
  STD_TORCH_CHECK(
      !norm_weight || !norm_bias || norm_weight->scalar_type() == norm_bias->scalar_type(), op,
      ": the norm's weight and bias must have the same dtype");
  const AnyNorm norm{as_contiguous(norm_weight), as_contiguous(norm_bias), eps};
  const int64_t places = start ? *start + is.length : keys.size(2);
  STD_TORCH_CHECK(!start || (*start >= 0 && places <= keys.size(2)), op, ": the cache has ",
                  keys.size(2), " places");
  STD_TORCH_CHECK(!start || is.length == 1 || *start == 0, op,
                  ": several tokens at once must be the first");
  Tensor output = fresh_like(x);
  if (rows == 0) return output;

  const int64_t element = static_cast<int64_t>(x.element_size());
  const void* from = x.const_data_ptr();
  if (norm_first) {
    void* normed = bytes_of(shared_scratch(kNormedSlot), rows * width * element);
    norm.run(x, from, normed, rows, width);
    from = normed;
  }
  char* projected = bytes_of(shared_scratch(kProjectedSlot), rows * parts * width * element);
  in.run(from, rows, nullptr, projected, 0);
  if (start) {
    append(is, projected + width * element, parts * width * element, keys, *start);
    append(is, projected + 2 * width * element, parts * width * element, values, *start);
  }
  void* attended = bytes_of(shared_scratch(kAttendedSlot), rows * width * element);
  const bool causal = start && is.length > 1;
  if (is_half(x)) {
    attend<TypedAttentionArgs>(is, keys, values, places, projected, parts * width, attended, causal,
                               mask, key_lengths);
  } else {
    attend<AttentionArgs>(is, keys, values, places, projected, parts * width, attended, causal,
                          mask, key_lengths);
  }
  void* y = output.mutable_data_ptr();
  out.run(attended, rows, x.const_data_ptr(), y, 1);
  if (!norm_first) norm.run(x, y, y, rows, width);
  trim_shared_scratch();
  return output;
}

// (sizes), uninitialised and of like's dtype.
Tensor uninitialized(Tensor like, std::vector<int64_t> sizes) {
  STD_TORCH_CHECK(like.is_cpu(), "uninitialized: like must be on the CPU");
  return fresh(like, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_decode_attention(Tensor input, Tensor(a!) keys, Tensor(b!) values, int? start, "
      "Tensor in_weight, Tensor? in_packed, Tensor? in_bias, Tensor out_weight, "
      "Tensor? out_packed, Tensor? out_bias, Tensor? norm_weight, Tensor? norm_bias, float eps, "
      "bool norm_first, Tensor? mask, Tensor? key_lengths) -> Tensor");
  m.def("cpu_uninitialized(Tensor like, int[] sizes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_decode_attention", TORCH_BOX(&tf::decode_attention));
  m.impl("cpu_uninitialized", TORCH_BOX(&tf::uninitialized));
}
