#include "cpu/core/caching_allocator.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace tf {
namespace {

constexpr size_t kHuge = kHugePage, kStep = size_t{64} << 10;
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
    // What has no whole huge page need not be aligned to one.
    const size_t spare = bytes < kHuge ? 0 : kHuge;
    void* all =
        mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return {nullptr, 0};
    if (spare == 0) return {all, bytes};
    const auto begin = reinterpret_cast<uintptr_t>(all);
    const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
    if (first > begin) munmap(all, first - begin);
    if (begin + kHuge > first)
      munmap(reinterpret_cast<void*>(first + bytes), begin + kHuge - first);
    void* data = reinterpret_cast<void*>(first);
    madvise(data, bytes / kHuge * kHuge, MADV_HUGEPAGE);  // whole huge pages only
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

}  // namespace tf
