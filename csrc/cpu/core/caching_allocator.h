// Caching allocator for large tensors: freed blocks are reused, since mapping a page anew costs
// more than writing it several times.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tf {

constexpr size_t kHugePage = size_t{2} << 20;
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

}  // namespace tf
