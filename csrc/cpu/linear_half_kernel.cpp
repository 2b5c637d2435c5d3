// Linear map with epilogue for half types. A block of rows is brought once into the form that the
// product wants and stays in the second-level cache; the weights stream by in panels, and each row
// of a result is finished in registers.
#include "cpu/linear_half_kernel.h"

#include "cpu/half_rows.h"

namespace tf::TF_ISA {
namespace {

template <class T>
long row_block(long k) {
  return block_rows<T>(k * static_cast<long>(sizeof(typename Product<T>::Operand)));
}

template <class T>
void pack(const void* weight, long stride, long n, long k, void* packed, long begin, long end) {
  using P = Product<T>;
  auto* panels = static_cast<typename P::Operand*>(packed);
  for (long p = begin; p < end; ++p) {
    const long row = p * kPanel;
    P::pack_rows(static_cast<const T*>(weight) + row * stride, stride, least(kPanel, n - row), k,
                 panels + p * P::panel_size(k));
  }
}

template <class T>
bool matches(const void* weight, long stride, long n, long k, const void* packed) {
  using P = Product<T>;
  constexpr uint64_t kSamples = 24, kGolden = 0x9e3779b97f4a7c15;
  const uint64_t size = static_cast<uint64_t>(n) * static_cast<uint64_t>(k);
  for (uint64_t i = 0; i < kSamples && size > 0; ++i) {
    const long place = static_cast<long>((i * kGolden >> 16) % size);
    const long row = place / k, column = place % k;
    const auto* panel =
        static_cast<const typename P::Operand*>(packed) + row / kPanel * P::panel_size(k);
    const float now = load_one(static_cast<const T*>(weight) + row * stride + column);
    const float then = P::element(panel, column, row % kPanel);
    if (std::memcmp(&now, &then, sizeof(float)) != 0) return false;
  }
  return true;
}

template <class T>
void block(const HalfLinearArgs& args, long row_begin, long row_end, long panel_begin,
           long panel_end, void* scratch) {
  using P = Product<T>;
  P::enter();
  const auto* packed = static_cast<const typename P::Operand*>(args.packed);
  const long most_rows = row_block<T>(args.k);
  auto* a = static_cast<typename P::Operand*>(scratch);
  float* sums = reinterpret_cast<float*>(a + P::block_size(most_rows, args.k));
  const long count = (row_end - row_begin + most_rows - 1) / most_rows;
  for (long item = 0, row = row_begin; item < count; ++item) {
    const long rows = (row_end - row + count - item - 1) / (count - item);
    P::fill(static_cast<const T*>(args.x) + row * args.x_stride, args.x_stride, rows, args.k, a);
    for (long p = panel_begin; p < panel_end; ++p) {
      const long column = p * kPanel;
      const auto* panel = packed + p * P::panel_size(args.k);
      const Ends<T> ends(args.bias, column, args.n, args.activation);
      const auto* residual = static_cast<const T*>(args.residual);
      if (residual != nullptr) residual += row * args.residual_stride + column;
      T* y = static_cast<T*>(args.y) + row * args.y_stride + column;
      P::multiply(a, rows, args.k, panel, panel + P::panel_size(args.k), sums,
                  [&](long i, Vec low, Vec high) __attribute__((always_inline)) {
                    ends.finish(low, high);
                    if (residual != nullptr)
                      ends.add(residual + i * args.residual_stride, low, high);
                    ends.write(y + i * args.y_stride, low, high);
                  });
    }
    row += rows;
  }
  P::leave();
}

template <class T>
long scratch_bytes(long k) {
  using P = Product<T>;
  const long rows = row_block<T>(k);
  return P::block_size(rows, k) * static_cast<long>(sizeof(typename P::Operand)) +
         P::buffer_size(rows) * static_cast<long>(sizeof(float));
}

template <class T>
long packed_bytes(long n, long k) {
  using P = Product<T>;
  return round_up(n, kPanel) / kPanel * P::panel_size(k) *
         static_cast<long>(sizeof(typename P::Operand));
}

}  // namespace

long half_panel_columns() { return kPanel; }

long half_packed_bytes(Element type, long n, long k) {
  return type == Element::bfloat16 ? packed_bytes<BFloat16>(n, k) : packed_bytes<Float16>(n, k);
}

long half_packed_layout(Element type) {
  return kPanel + (type == Element::bfloat16 && sizeof(Product<BFloat16>::Operand) == 2 ? 1 : 0);
}

void half_pack_panels(Element type, const void* weight, long stride, long n, long k, void* packed,
                      long begin, long end) {
  (type == Element::bfloat16 ? pack<BFloat16> : pack<Float16>)(weight, stride, n, k, packed, begin,
                                                               end);
}

bool half_packed_matches(Element type, const void* weight, long stride, long n, long k,
                         const void* packed) {
  return (type == Element::bfloat16 ? matches<BFloat16> : matches<Float16>)(weight, stride, n, k,
                                                                            packed);
}

long half_linear_row_block(const HalfLinearArgs& args) {
  return args.type == Element::bfloat16 ? row_block<BFloat16>(args.k) : row_block<Float16>(args.k);
}

long half_linear_scratch(const HalfLinearArgs& args) {
  return args.type == Element::bfloat16 ? scratch_bytes<BFloat16>(args.k)
                                        : scratch_bytes<Float16>(args.k);
}

void half_linear_block(const HalfLinearArgs& args, long row_begin, long row_end, long panel_begin,
                       long panel_end, void* scratch) {
  (args.type == Element::bfloat16 ? block<BFloat16> : block<Float16>)(args, row_begin, row_end,
                                                                      panel_begin, panel_end,
                                                                      scratch);
}

}  // namespace tf::TF_ISA
