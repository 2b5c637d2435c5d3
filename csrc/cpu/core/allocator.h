// Allocates the uninitialised results of operators. Freed blocks of large ones are cached and
// reused, since mapping a page anew costs more than writing it several times.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace tf {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr size_t kHugePage = size_t{2} << 20;
// Requests huge pages for a range; macOS has no such request.
inline void use_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
}
// Smaller tensors are allocated by PyTorch.
#ifdef TF_SANITIZE
constexpr int64_t kMinCachedBytes = INT64_MAX;  // the sanitizer checks what malloc returns
#else
constexpr int64_t kMinCachedBytes = int64_t{256} << 10;
#endif

struct CachedBlock {
  void* data;  // nullptr: out of memory
  size_t bytes;
};

// Returns an uninitialised block of at least `bytes`. Thread-safe, as is cached_free().
CachedBlock cached_allocate(size_t bytes);
void cached_free(const CachedBlock& block);

// Frees all cached blocks, for use when an allocation fails; returns whether there were any.
bool release_cached();

// Limit and current size of the cache in bytes; the limit is 0 by default. Lowering it frees the
// excess at once. While it is 0, results are allocated by PyTorch and can be resized.
void set_cache_limit(size_t bytes);
size_t cache_limit();
size_t cached_bytes();

// Enables filling new tensors with NaN (integers with -1), for tests; returns the previous setting.
bool fill_empty(bool fill);

// Contiguous, of like's dtype or float32. Large tensors come from the caching allocator.
Tensor empty_tensor(const Tensor& like, IntHeaderOnlyArrayRef sizes, bool in_float = false);

inline Tensor empty_tensor(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return empty_tensor(like, IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()));
}
inline Tensor empty_float_tensor(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return empty_tensor(like, IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), true);
}
inline Tensor empty_tensor_like(const Tensor& like) { return empty_tensor(like, like.sizes()); }
// Shape of `input` with `columns` as the last dimension.
Tensor empty_rows(const Tensor& input, int64_t columns);
// fp32 statistics, one per row of the last `dims` dimensions, in the shape of the leading
// dimensions.
Tensor empty_statistics(const Tensor& input, int64_t dims);

// Memory for a packed weight, aligned to a huge page: reading weights is limited by bandwidth, and
// 4 KiB pages cost a fifth of it.
Tensor empty_packed_weight(const Tensor& like, int64_t count, bool in_bfloat16 = false);

// Throws PyTorch's out-of-memory exception.
[[noreturn]] void throw_out_of_memory(int64_t bytes);

}  // namespace tf
