#include "cpu/core/kept_memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace tf {
namespace {

constexpr size_t kHuge = kHugePage, kStep = size_t{64} << 10;
// No address space is larger, and sizes up to it can be rounded up.
constexpr size_t kMost = size_t{1} << 57;

class KeptMemory {
 public:
  KeptBlock take(size_t bytes) {
    if (bytes > kMost) return {nullptr, 0};
    const size_t wanted = (bytes + kStep - 1) / kStep * kStep;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      // The smallest that holds it and wastes little, of equals the last one: it may be in cache.
      const size_t most = wanted + wanted / 4;
      auto best = blocks_.rend();
      for (auto it = blocks_.rbegin(); it != blocks_.rend(); ++it)
        if (it->bytes >= wanted && it->bytes <= most &&
            (best == blocks_.rend() || it->bytes < best->bytes))
          best = it;
      if (best != blocks_.rend()) {
        const KeptBlock block = *best;
        blocks_.erase(std::next(best).base());
        total_ -= block.bytes;
        return block;
      }
    }
    KeptBlock block = map(wanted);
    if (block.place == nullptr && release()) block = map(wanted);
    return block;
  }

  // Frees all that is kept; whether that was anything.
  bool release() {
    std::vector<KeptBlock> all;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      all.swap(blocks_);
      total_ = 0;
    }
    unmap(all);
    return !all.empty();
  }

  void give_back(const KeptBlock& block) {
    std::vector<KeptBlock> beyond;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      blocks_.push_back(block);
      total_ += block.bytes;
      beyond = cut();
    }
    unmap(beyond);
  }

  void set_limit(size_t bytes) {
    std::vector<KeptBlock> beyond;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      limit_ = bytes;
      beyond = cut();
    }
    unmap(beyond);
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
  // Takes out the oldest blocks beyond the limit.
  std::vector<KeptBlock> cut() {
    size_t count = 0;
    for (; total_ > limit_; ++count) total_ -= blocks_[count].bytes;
    const auto end = blocks_.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<KeptBlock> beyond(blocks_.begin(), end);
    blocks_.erase(blocks_.begin(), end);
    return beyond;
  }

  static void unmap(const std::vector<KeptBlock>& blocks) {
    for (const KeptBlock& block : blocks) munmap(block.place, block.bytes);
  }

  static KeptBlock map(size_t bytes) {
    void* all =
        mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return {nullptr, 0};
    const auto begin = reinterpret_cast<uintptr_t>(all);
    const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
    if (first > begin) munmap(all, first - begin);
    if (begin + kHuge > first)
      munmap(reinterpret_cast<void*>(first + bytes), begin + kHuge - first);
    void* place = reinterpret_cast<void*>(first);
    madvise(place, bytes / kHuge * kHuge, MADV_HUGEPAGE);  // whole ones: none is wasted
    return {place, bytes};
  }

  std::mutex lock_;
  std::vector<KeptBlock> blocks_;  // in the order in which they came back
  size_t total_ = 0, limit_ = 0;
};

KeptMemory& kept() {
  // Never destroyed: tensors may outlive it.
  static KeptMemory* const memory = [] {
    auto* made = new KeptMemory;
    // A child process must not find the lock held by a thread that it does not have.
    pthread_atfork([] { kept().lock().lock(); }, [] { kept().lock().unlock(); },
                   [] { kept().lock().unlock(); });
    return made;
  }();
  return *memory;
}

}  // namespace

KeptBlock take_memory(size_t bytes) { return kept().take(bytes); }
void give_back(const KeptBlock& block) { kept().give_back(block); }
bool release_kept() { return kept().release(); }
void set_kept_limit(size_t bytes) { kept().set_limit(bytes); }
size_t kept_limit() { return kept().limit(); }
size_t kept_bytes() { return kept().total(); }

}  // namespace tf
