#include "cpu/fresh.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cpu/kept_memory.h"

// In PyTorch from 2.11 on; the binary serves older ones too.
extern "C" [[gnu::weak]] AOTITorchError torch_from_blob(
    void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset,
    int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* result,
    int32_t layout, const uint8_t* opaque, int64_t opaque_size,
    void (*deleter)(void* data, void* context), void* context);

namespace tf {
namespace {

constexpr int64_t kHuge = kHugePage;

std::atomic<bool> filling{false};

// Asks for huge pages under fresh memory, whole ones only: a page fault costs as much as writing
// the page. The largest are mapped anew at each call, and gathering so many huge pages may cost
// the kernel more than they save.
void prefer_huge_pages(const Tensor& tensor) {
  constexpr uintptr_t kPage = kHuge, kMost = uintptr_t{96} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  if (end - begin > kMost) return;
  const uintptr_t first = (begin + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void come_back(void* place, void* bytes) {
  give_back({place, static_cast<size_t>(reinterpret_cast<uintptr_t>(bytes))});
}

// The tensor, filled if all are to be.
Tensor filled(AtenTensorHandle handle, size_t bytes) {
  Tensor result(handle);
  if (bytes > 0 && filling.load(std::memory_order_relaxed))
    std::memset(result.mutable_data_ptr(), 0xff, bytes);
  return result;
}

}  // namespace

bool fill_fresh(bool fill) { return filling.exchange(fill, std::memory_order_relaxed); }

Tensor fresh(const Tensor& like, IntHeaderOnlyArrayRef sizes, bool in_float) {
  const auto dims = static_cast<int64_t>(sizes.size());
  constexpr int64_t kUsual = 8;
  int64_t few[kUsual];
  std::vector<int64_t> many(dims > kUsual ? sizes.size() : 0);
  int64_t* strides = dims > kUsual ? many.data() : few;
  int64_t count = 1, stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    const int64_t size = sizes[static_cast<size_t>(d)];
    strides[d] = stride;
    stride *= std::max<int64_t>(1, size);
    count *= size;
  }
  int32_t dtype = aoti_torch_dtype_float32(), device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  if (!in_float) TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  const size_t element = in_float ? sizeof(float) : static_cast<size_t>(like.element_size());
  const size_t bytes = static_cast<size_t>(count) * element;
  AtenTensorHandle handle;
  if (bytes >= kLeastKept && torch_from_blob != nullptr) {
    const KeptBlock block = take_memory(bytes);
    if (block.place != nullptr) {
      TORCH_ERROR_CODE_CHECK(torch_from_blob(block.place, dims, sizes.data(), strides, 0, dtype,
                                             aoti_torch_device_type_cpu(), device_index, &handle,
                                             aoti_torch_layout_strided(), nullptr, 0, come_back,
                                             reinterpret_cast<void*>(block.bytes)));
      return filled(handle, bytes);
    }
  }
  // Half the price of new_empty(), which goes by names.
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, sizes.data(), strides, dtype, aoti_torch_device_type_cpu(), device_index, &handle));
  Tensor result = filled(handle, bytes);
  if (bytes >= kLeastKept) prefer_huge_pages(result);
  return result;
}

Tensor fresh_rows(const Tensor& input, int64_t columns) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  return fresh(input, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

Tensor fresh_weight(const Tensor& like, int64_t count, std::optional<ScalarType> type) {
  Tensor all = torch::stable::new_empty(like, {&count, 1}, type);
  const int64_t element = static_cast<int64_t>(all.element_size()), bytes = count * element;
  if (bytes < kHuge) return all;
  const int64_t sizes[] = {count + kHuge / element};
  all = torch::stable::new_empty(like, {sizes, 1}, type);
  const auto begin = reinterpret_cast<uintptr_t>(all.data_ptr());
  const int64_t skip = static_cast<int64_t>((kHuge - begin % kHuge) % kHuge);
  // Only whole ones, so that no memory is wasted.
  madvise(reinterpret_cast<void*>(begin + static_cast<uintptr_t>(skip)),
          static_cast<size_t>(bytes / kHuge * kHuge), MADV_HUGEPAGE);
  return torch::stable::narrow(all, 0, skip / element, count);
}

namespace {

Tensor uninitialised(Tensor like) { return fresh_like(like); }

}  // namespace
}  // namespace tf

// What operators have for their results, for tests of that.
STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) { m.def("cpu_fresh(Tensor like) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_fresh", TORCH_BOX(&tf::uninitialised));
}
