// Memory of large tensors, kept when they are gone for the next ones: to map a page anew costs more
// than to write it several times.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tf {

constexpr size_t kHugePage = size_t{2} << 20;
// Smaller tensors are the C library's.
#ifdef TF_SANITIZE
constexpr size_t kMinCachedBytes = SIZE_MAX;  // all memory is malloc's, which the sanitizer watches
#else
constexpr size_t kMinCachedBytes = kHugePage;
#endif

struct CachedBlock {
  void* data;  // nullptr: there is no memory
  size_t bytes;
};

// Uninitialised, at least so many bytes. Threads may take and give back at the same time.
CachedBlock cached_allocate(size_t bytes);
void cached_free(const CachedBlock& block);

// Frees what is kept, for whoever finds no memory; whether that was anything.
bool release_cached();

// Bytes that are kept at most, 0 to begin with, and now. A lower limit frees at once what is beyond
// it. While it is 0 results lie in PyTorch's memory, which can be resized.
void set_cache_limit(size_t bytes);
size_t cache_limit();
size_t cached_bytes();

}  // namespace tf
