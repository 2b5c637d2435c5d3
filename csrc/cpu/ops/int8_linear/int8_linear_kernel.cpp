// 8-bit products as an instance of the linear layer's loops, and the feed-forward network.
#include "cpu/gemm/int8.h"
#include "cpu/ops/int8_linear/int8_linear.h"
#include "cpu/ops/linear/linear_product.h"

namespace tf::TF_ISA {
namespace {

#if defined(__AMX_BF16__)
constexpr Index kRowUnit = 16;
#else
constexpr Index kRowUnit = 1;
#endif

template <class T, class X = T, class Y = T, class P = Int8Product<X>>
constexpr LinearKernels kLinearKernels{.in_fp32 = false,
                                       .quantizes = true,
                                       .layout = kPanel + P::kBytes,
                                       .panel = kPanel,
                                       .row_unit = kRowUnit,
                                       .packed_bytes = packed_bytes<P>,
                                       .pack = pack<int8_t, P>,
                                       .row_block = row_block<P>,
                                       .scratch = scratch_bytes<T, P>,
                                       .block = block<T, P, X, Y>,
                                       .max_depth = kMaxInt8Depth,
                                       .panels_rows = row_block<P>,
                                       .panels_scratch = panels_scratch<T, P>,
                                       .fill = fill<X, P>,
                                       .panels = panels<T, P, X, Y>};

// Hidden units until the range of a row is known: their rounding is small compared to a step of
// 1/254 of the range, and they take half the cache that fp32 takes.
using Hidden = BFloat16;

// A block of rows: its hidden units are quantised once their range is known.
struct Workspace {
  char *x, *quantized;
  Hidden* hidden;
  float* sums;
  Index hidden_stride, bytes;

  template <class First, class Second>
  Workspace(const FeedForwardArgs& args, Index rows, void* scratch, First, Second)
      : hidden_stride(round_up(args.f, kPanel) + kPanel) {  // not a power of two
    x = static_cast<char*>(scratch);
    quantized = x + First::block_size(rows, args.k);
    sums = reinterpret_cast<float*>(quantized + Second::block_size(rows, args.f));
    hidden = reinterpret_cast<Hidden*>(sums + First::buffer_size(rows));
    bytes = First::block_size(rows, args.k) + Second::block_size(rows, args.f) +
            First::buffer_size(rows) * static_cast<Index>(sizeof(float)) +
            rows * hidden_stride * static_cast<Index>(sizeof(Hidden));
  }
};

template <class T>
Index network_row_block(const FeedForwardArgs& args) {
  return block_rows<Int8Product<T>>(args.k + args.f * (1 + static_cast<Index>(sizeof(Hidden))));
}

template <class T>
Index network_scratch(const FeedForwardArgs& args, Index rows) {
  return Workspace(args, rows, nullptr, Int8Product<T>(), Int8Product<Hidden>()).bytes;
}

template <class T>
void network(const FeedForwardArgs& args, Index begin, Index end, void* scratch) {
  using First = Int8Product<T>;
  using Second = Int8Product<Hidden>;
  const Index rows = end - begin;
  const Workspace work(args, rows, scratch, First(), Second());
  const auto* w1 = static_cast<const char*>(args.packed1);
  const auto* w2 = static_cast<const char*>(args.packed2);
  First::enter();
  First::fill(static_cast<const T*>(args.x) + begin * args.x_stride, args.x_stride, rows, args.k,
              work.x, args.factors1);
  with_coarse_activation(args.activation, [&](auto activation) {
    for (Index j = 0; j < args.f; j += kPanel, w1 += First::panel_size(args.k)) {
      First::multiply(
          work.x, rows, args.k, w1, j + kPanel < args.f ? w1 + First::panel_size(args.k) : w2,
          work.sums,
          [=, &args,
           epilogue = Epilogue<T, activation>(args.bias1, j, args.f, args.activation, args.scale1)](
              Index i, Vec low, Vec high) __attribute__((always_inline)) {
            epilogue.dequantize(First::row_scale(work.x, i), low, high);
            epilogue.finish(low, high);
            Hidden* to = work.hidden + i * work.hidden_stride + j;
            store(to, low);
            store(to + kLanes, high);
          },
          {work.hidden + j, work.hidden_stride * static_cast<Index>(sizeof(Hidden))});
    }
  });
  Second::fill(work.hidden, work.hidden_stride, rows, args.f, work.quantized, args.factors2);
  T* y = static_cast<T*>(args.y) + begin * args.n;
  const auto* residual = static_cast<const T*>(args.residual);
  if (residual != nullptr) residual += begin * args.residual_stride;
  for (Index j = 0; j < args.n; j += kPanel, w2 += Second::panel_size(args.f)) {
    Second::multiply(
        work.quantized, rows, args.f, w2, w2 + Second::panel_size(args.f), work.sums,
        [=, &args, epilogue = Epilogue<T>(args.bias2, j, args.n, kIdentity, args.scale2)](
            Index i, Vec low, Vec high) __attribute__((always_inline)) {
          epilogue.dequantize(Second::row_scale(work.quantized, i), low, high);
          epilogue.finish(low, high);
          if (residual != nullptr) epilogue.add(residual + i * args.residual_stride + j, low, high);
          epilogue.write(y + i * args.n + j, low, high);
        },
        {y + j, args.n * static_cast<Index>(sizeof(T))});
  }
  First::leave();
}

template <class T>
constexpr FeedForwardKernels kNetworkKernels{.row_unit = kRowUnit,
                                             .row_block = network_row_block<T>,
                                             .scratch = network_scratch<T>,
                                             .rows = network<T>};

}  // namespace

const LinearKernels* int8_linear_kernels(Element type, Element x_type, Element y_type) {
  if (x_type != type) return &kLinearKernels<float, BFloat16, float>;
  if (y_type != type) return &kLinearKernels<float, float, BFloat16>;
  return dispatch_element(
      type, [](auto t) -> const LinearKernels* { return &kLinearKernels<decltype(t)>; });
}

const FeedForwardKernels* int8_feed_forward_kernels(Element type) {
  return dispatch_element(
      type, [](auto t) -> const FeedForwardKernels* { return &kNetworkKernels<decltype(t)>; });
}

}  // namespace tf::TF_ISA
