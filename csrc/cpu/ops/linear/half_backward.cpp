// Gradients of linear maps and of the feed-forward network for bfloat16 and float16: what the
// operators in linear.cpp and feed_forward.cpp call for these types.
#include "cpu/gemm/half_host.h"
#include "cpu/gemm/weight_gradient_host.h"
#include "cpu/ops/feed_forward/feed_forward_backward_half_kernel.h"
#include "cpu/ops/linear/backward_calls.h"
#include "cpu/ops/linear/linear_backward_half_kernel.h"

namespace tf::half {
namespace {

const void* at(const void* rows, int64_t elements) {
  return static_cast<const uint16_t*>(rows) + elements;
}
void* at(void* rows, int64_t elements) { return static_cast<uint16_t*>(rows) + elements; }

// A matrix (m, k) in panels of its columns, at `place`.
void pack_columns(Element type, const void* matrix, int64_t stride, int64_t m, int64_t k,
                  void* place) {
  const int64_t rows = TF_DISPATCH(half_pack_rows, );
  const int64_t grain = std::max<int64_t>(1, 32768 / (rows * std::max<int64_t>(1, k)));
  torch::stable::parallel_for(0, (m + rows - 1) / rows, grain, [&](int64_t begin, int64_t end) {
    TF_DISPATCH(half_pack_columns, type, matrix, stride, m, k, place, begin, end);
  });
}

// Room for that, with some for prefetching behind.
void* column_panels(Element type, int64_t m, int64_t k, int slot) {
  constexpr int64_t kTail = 4096;
  return bytes_of(shared_scratch(slot), TF_DISPATCH(half_packed_bytes, type, k, m) + kTail);
}

// Panels take as much memory as their rows do, or, where products are of fp32, twice as much.
int64_t part_rows(int64_t columns) { return weight_gradient_part(int64_t{8} << 20, columns); }

// Sums of a part of the rows, if there are several parts; those of the bias are always needed.
class Sums {
 public:
  Sums(float* place, int64_t n, int64_t k, bool parts)
      : bias_(place), weight_(parts ? place + n : nullptr), size_(n + (parts ? n * k : 0)) {}
  static int64_t floats(int64_t n, int64_t k, bool parts) { return n + (parts ? n * k : 0); }
  float* end() const { return bias_ + size_; }
  void give_to(HalfWeightGradientArgs& args) const {
    args.sums = weight_;
    args.bias_sums = bias_;
  }

 private:
  float *bias_, *weight_;
  int64_t size_;
};

void run_weight_gradient(const HalfWeightGradientArgs& args) {
  if (args.grad_bias != nullptr) {
    const int64_t grain = std::max<int64_t>(64, 32768 / std::max<int64_t>(1, args.m));
    torch::stable::parallel_for(0, args.n, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(half_bias_gradient, args, begin, end);
    });
  }
  if (args.grad_weight == nullptr || args.k == 0) return;
  const int64_t scratch = TF_DISPATCH(half_weight_gradient_scratch, args.type);
  for_each_weight_block(args.n, args.k, TF_DISPATCH(half_panel_columns, ),
                        TF_DISPATCH(half_weight_gradient_rows, ),
                        TF_DISPATCH(half_weight_gradient_columns, ),
                        [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
                          TF_DISPATCH(half_weight_gradient, args, begin, end, from, to,
                                      bytes_of(kernel_scratch(), scratch));
                        });
}

}  // namespace

const void* column_panels_of(const Tensor& weight, int slot) {
  const HalfRows w = half_rows(weight);
  const Element type = element_of(weight);
  void* place = column_panels(type, weight.size(0), weight.size(1), slot);
  pack_columns(type, w.data, w.stride, weight.size(0), weight.size(1), place);
  return place;
}

void run_weight_gradient(HalfWeightGradientArgs args, const void* x, int64_t x_stride, int slot) {
  if (args.grad_weight != nullptr && args.k > 0) {
    void* panels = column_panels(args.type, args.m, args.k, slot);
    pack_columns(args.type, x, x_stride, args.m, args.k, panels);
    args.panels = panels;
  }
  run_weight_gradient(args);
}

void linear_gradients(LinearGradients& call) {
  const int64_t m = call.m, n = call.n, k = call.k;
  const Element type = element_of(call.input);
  if (call.want_input && k > 0) {
    TypedLinearArgs args{type, call.dy, nullptr, nullptr,        nullptr, data_of(&call.grad_input),
                         m,    n,       k,       call.dy_stride, k,       k,
                         0};
    if (packs_by_panel(args)) {
      const HalfRows w = half_rows(call.weight);
      args.weight = w.data;
      args.weight_stride = w.stride;
      args.turned = true;
      run_packing_linear(args);
    } else {
      args.packed = column_panels_of(call.weight, 0);
      run_linear(args);
    }
  }
  if (!call.want_weight && !call.want_bias) return;
  const HalfRows x = half_rows(call.input);
  const int64_t most = part_rows(k);
  const Sums sums(shared_scratch(3).floats(Sums::floats(n, k, most < m)), n, k, most < m);
  HalfWeightGradientArgs args{};
  sums.give_to(args);
  args.type = type;
  args.grad_weight = data_if(call.want_weight, call.grad_weight);
  args.grad_bias = data_if(call.want_bias, call.grad_bias);
  args.n = n;
  args.k = k;
  args.grad_stride = call.dy_stride;
  for (int64_t begin = 0; begin < m; begin += most) {
    args.m = std::min(most, m - begin);
    args.grad = at(call.dy, begin * call.dy_stride);
    args.first = begin == 0;
    args.last = begin + args.m == m;
    run_weight_gradient(args, at(x.data, begin * x.stride), x.stride, 2);
  }
}

void feed_forward_gradients(FeedForwardGradients& call) {
  const int64_t m = call.m, k = call.k, f = call.f, n = call.n;
  const bool (&wants)[5] = call.wants;
  const Element type = element_of(call.input);
  const HalfRows dy = half_rows(call.grad), x = half_rows(call.input);
  const bool through = call.through(), first = wants[1] || wants[2];
  const int64_t most = part_rows(std::max(k, f)), rows = std::min(m, most);
  const bool parts = most < m;

  HalfFeedForwardBackwardArgs back{};
  HalfFeedForwardArgs& products = back.products;
  products.type = type;
  products.x_stride = dy.stride;
  products.k = n;
  products.f = f;
  products.n = k;
  products.activation = call.activation;
  products.dropout = call.dropout;
  if (through || wants[3]) products.packed1 = column_panels_of(call.weight2, 0);
  if (wants[0]) products.packed2 = column_panels_of(call.weight1, 1);
  back.grad_z = first ? shared_scratch(2).floats((rows + 1) / 2, f) : nullptr;
  back.hidden = wants[3] ? column_panels(type, rows, f, 3) : nullptr;

  HalfWeightGradientArgs sums1{}, sums2{};
  float* place = shared_scratch(5).floats(Sums::floats(f, k, parts) + Sums::floats(n, f, parts));
  const Sums kept1(place, f, k, parts), kept2(kept1.end(), n, f, parts);
  kept1.give_to(sums1);
  kept2.give_to(sums2);
  sums1.type = sums2.type = type;
  sums1.grad_weight = call.place(1);
  sums1.grad_bias = call.place(2);
  sums1.n = sums1.grad_stride = f;
  sums1.k = k;
  sums2.grad_weight = call.place(3);
  sums2.grad_bias = call.place(4);
  sums2.n = n;
  sums2.k = f;
  sums2.grad_stride = dy.stride;

  for (int64_t begin = 0; begin < m; begin += most) {
    const int64_t count = std::min(most, m - begin);
    products.m = sums1.m = sums2.m = count;
    sums1.first = sums2.first = begin == 0;
    sums1.last = sums2.last = begin + count == m;
    sums1.grad = back.grad_z;
    sums2.grad = products.x = at(dy.data, begin * dy.stride);
    sums2.panels = back.hidden;
    back.z = at(call.preactivation.const_data_ptr(), begin * f);
    products.row = begin;
    products.y = wants[0] ? at(call.place(0), begin * k) : nullptr;
    if (through || wants[3]) {
      const int64_t tall = TF_DISPATCH(half_feed_forward_row_block, products);
      for_each_row_block(count, tall, [&](int64_t from, int64_t to) {
        const int64_t scratch = TF_DISPATCH(half_feed_forward_backward_scratch, back, to - from);
        TF_DISPATCH(half_feed_forward_backward_rows, back, from, to,
                    bytes_of(kernel_scratch(), scratch));
      });
    }
    if (first) run_weight_gradient(sums1, at(x.data, begin * x.stride), x.stride, 4);
    if (wants[3] || wants[4]) run_weight_gradient(sums2);
  }
}

}  // namespace tf::half
