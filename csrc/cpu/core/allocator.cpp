#include "cpu/core/allocator.h"

#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "cpu/core/host.h"

// PyTorch has this function from 2.11 on. It is weak since the binary also runs with older
// versions.
extern "C" [[gnu::weak]] AOTITorchError torch_from_blob(
    void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset,
    int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* result,
    int32_t layout, const uint8_t* opaque, int64_t opaque_size,
    void (*deleter)(void* data, void* context), void* context);

namespace tf {
namespace {

constexpr size_t kStep = size_t{64} << 10;
// Larger than any address space, and small enough to be rounded up without overflow.
constexpr size_t kMaxBytes = size_t{1} << 57;

class CachingAllocator {
 public:
  CachedBlock allocate(size_t bytes) {
    if (bytes > kMaxBytes) return {nullptr, 0};
    const size_t rounded = (bytes + kStep - 1) / kStep * kStep;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      // Best fit that wastes at most a quarter; among equals the most recently freed one, which may
      // still be in the CPU cache.
      const size_t max_bytes = rounded + rounded / 4;
      auto best = blocks_.rend();
      for (auto it = blocks_.rbegin(); it != blocks_.rend(); ++it)
        if (it->bytes >= rounded && it->bytes <= max_bytes &&
            (best == blocks_.rend() || it->bytes < best->bytes))
          best = it;
      if (best != blocks_.rend()) {
        const CachedBlock block = *best;
        blocks_.erase(std::next(best).base());
        total_ -= block.bytes;
        return block;
      }
    }
    CachedBlock block = map(rounded);
    if (block.data == nullptr && release()) block = map(rounded);
    return block;
  }

  // Frees all cached blocks; returns whether there were any.
  bool release() {
    std::vector<CachedBlock> all;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      all.swap(blocks_);
      total_ = 0;
    }
    unmap(all);
    return !all.empty();
  }

  void deallocate(const CachedBlock& block) {
    std::vector<CachedBlock> evicted;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      blocks_.push_back(block);
      total_ += block.bytes;
      evicted = evict();
    }
    unmap(evicted);
  }

  void set_limit(size_t bytes) {
    std::vector<CachedBlock> evicted;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      limit_ = bytes;
      evicted = evict();
    }
    unmap(evicted);
  }

  size_t limit() {
    const std::lock_guard<std::mutex> guard(lock_);
    return limit_;
  }

  size_t total() {
    const std::lock_guard<std::mutex> guard(lock_);
    return total_;
  }

  std::mutex& lock() { return lock_; }

 private:
  // Removes the oldest blocks beyond the limit.
  std::vector<CachedBlock> evict() {
    size_t count = 0;
    for (; total_ > limit_; ++count) total_ -= blocks_[count].bytes;
    const auto end = blocks_.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<CachedBlock> evicted(blocks_.begin(), end);
    blocks_.erase(blocks_.begin(), end);
    return evicted;
  }

  static void unmap(const std::vector<CachedBlock>& blocks) {
    for (const CachedBlock& block : blocks) munmap(block.data, block.bytes);
  }

  static CachedBlock map(size_t bytes) {
    // Blocks smaller than a huge page need not be aligned to one.
    const size_t spare = bytes < kHugePage ? 0 : kHugePage;
    void* all =
        mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return {nullptr, 0};
    if (spare == 0) return {all, bytes};
    const auto begin = reinterpret_cast<uintptr_t>(all);
    const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    if (first > begin) munmap(all, first - begin);
    if (begin + kHugePage > first)
      munmap(reinterpret_cast<void*>(first + bytes), begin + kHugePage - first);
    void* data = reinterpret_cast<void*>(first);
    use_huge_pages(data, bytes / kHugePage * kHugePage);  // whole huge pages only
    return {data, bytes};
  }

  std::mutex lock_;
  std::vector<CachedBlock> blocks_;  // least recently freed first
  size_t total_ = 0, limit_ = 0;
};

CachingAllocator& allocator() {
  // Never destroyed: tensors may outlive it.
  static CachingAllocator* const memory = [] {
    auto* made = new CachingAllocator;
    // A forked child must not inherit a lock held by a thread that does not exist in it.
    pthread_atfork([] { allocator().lock().lock(); }, [] { allocator().lock().unlock(); },
                   [] { allocator().lock().unlock(); });
    return made;
  }();
  return *memory;
}

}  // namespace

CachedBlock cached_allocate(size_t bytes) { return allocator().allocate(bytes); }
void cached_free(const CachedBlock& block) { allocator().deallocate(block); }
bool release_cached() { return allocator().release(); }
void set_cache_limit(size_t bytes) { allocator().set_limit(bytes); }
size_t cache_limit() { return allocator().limit(); }
size_t cached_bytes() { return allocator().total(); }

namespace {

constexpr int64_t kHuge = kHugePage;

std::atomic<bool> filling{false};

// Requests huge pages for the part of the tensor that covers whole ones: a page fault costs as much
// as writing the page. The largest tensors are mapped anew by each call, and finding that many huge
// pages may cost the kernel more than it saves.
void prefer_huge_pages(const Tensor& tensor) {
  constexpr uintptr_t kPage = kHuge, kMaxBytes = uintptr_t{96} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  if (end - begin > kMaxBytes) return;
  const uintptr_t first = (begin + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
  if (last > first) use_huge_pages(reinterpret_cast<void*>(first), last - first);
}

void free_block(void* data, void* bytes) {
  cached_free({data, static_cast<size_t>(reinterpret_cast<uintptr_t>(bytes))});
}

// Wraps the handle; fills the tensor if fill_empty() is on.
Tensor maybe_fill(AtenTensorHandle handle, size_t bytes) {
  Tensor result(handle);
  if (bytes > 0 && filling.load(std::memory_order_relaxed))
    std::memset(result.mutable_data_ptr(), 0xff, bytes);
  return result;
}

// Allocates with PyTorch. The stable ABI drops the message of its out-of-memory error, so the error
// is raised here.
AtenTensorHandle empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device_index, int64_t bytes) {
  AtenTensorHandle handle;
  // Half the cost of new_empty(), which looks the operator up by name.
  const auto make = [&] {
    return aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(),
                                    device_index, &handle) == AOTI_TORCH_SUCCESS;
  };
  if (!make() && !(release_cached() && make())) throw_out_of_memory(bytes);
  return handle;
}

}  // namespace

bool fill_empty(bool fill) { return filling.exchange(fill, std::memory_order_relaxed); }

void throw_out_of_memory(int64_t bytes) {
  STD_TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
                  bytes, " bytes.");
}

Tensor empty_tensor(const Tensor& like, IntHeaderOnlyArrayRef sizes, bool in_float) {
  const auto dims = static_cast<int64_t>(sizes.size());
  constexpr int64_t kInlineDims = 8;
  int64_t small_strides[kInlineDims];
  std::vector<int64_t> large_strides(dims > kInlineDims ? sizes.size() : 0);
  int64_t* strides = dims > kInlineDims ? large_strides.data() : small_strides;
  int64_t stride = 1;
  bool is_empty = false, overflow = false;
  for (int64_t d = dims - 1; d >= 0; --d) {
    const int64_t size = sizes[static_cast<size_t>(d)];
    strides[d] = stride;
    overflow |= __builtin_mul_overflow(stride, std::max<int64_t>(1, size), &stride);
    is_empty |= size == 0;
  }
  int32_t dtype = aoti_torch_dtype_float32(), device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  if (!in_float) TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  const int64_t element = in_float ? 4 : static_cast<int64_t>(like.element_size());
  int64_t bytes = 0;
  overflow |= __builtin_mul_overflow(stride, element, &bytes);
  STD_TORCH_CHECK(is_empty || !overflow,
                  "Storage size calculation overflowed: the result has more than ", "2^63 bytes");
  if (is_empty) bytes = 0;
  const bool large = bytes >= kMinCachedBytes;
  if (large && torch_from_blob != nullptr && cache_limit() > 0) {
    const CachedBlock block = cached_allocate(static_cast<size_t>(bytes));
    if (block.data == nullptr) throw_out_of_memory(bytes);
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(torch_from_blob(block.data, dims, sizes.data(), strides, 0, dtype,
                                           aoti_torch_device_type_cpu(), device_index, &handle,
                                           aoti_torch_layout_strided(), nullptr, 0, free_block,
                                           reinterpret_cast<void*>(block.bytes)));
    return maybe_fill(handle, static_cast<size_t>(bytes));
  }
  Tensor result = maybe_fill(empty_strided(dims, sizes.data(), strides, dtype, device_index, bytes),
                             static_cast<size_t>(bytes));
  if (large) prefer_huge_pages(result);
  return result;
}

Tensor empty_rows(const Tensor& input, int64_t columns) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  return empty_tensor(input, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

Tensor empty_statistics(const Tensor& input, int64_t dims) {
  return empty_tensor(input, input.sizes().slice(0, static_cast<size_t>(input.dim() - dims)), true);
}

Tensor empty_packed_weight(const Tensor& like, int64_t count, bool in_bfloat16) {
  int32_t dtype = aoti_torch_dtype_bfloat16(), device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  if (!in_bfloat16) TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  const int64_t element = in_bfloat16 ? 2 : static_cast<int64_t>(like.element_size());
  const int64_t bytes = count * element, one = 1;
  const bool huge = bytes >= kHuge;
  const int64_t size = huge ? count + kHuge / element : count;
  Tensor all(empty_strided(1, &size, &one, dtype, device_index, size * element));
  if (!huge) return all;
  const auto begin = reinterpret_cast<uintptr_t>(all.data_ptr());
  const int64_t skip = static_cast<int64_t>((kHuge - begin % kHuge) % kHuge);
  // Whole huge pages only, to waste no memory.
  use_huge_pages(reinterpret_cast<void*>(begin + static_cast<uintptr_t>(skip)),
                 static_cast<size_t>(bytes / kHuge * kHuge));
  return torch::stable::narrow(all, 0, skip / element, count);
}

}  // namespace tf
