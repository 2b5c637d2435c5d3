// Helpers of the operators: registration, scratch memory, parallel loops, checks of arguments.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/core/allocator.h"
#include "cpu/core/isa.h"
#include "tensor_rows.h"
#include "types.h"

namespace tf {

// Number of running operators; negative while set_isa() stores its choice.
extern std::atomic<Index> running_operators;

void wait_for_set_isa();

// Function that returns whether the caller's context is batch invariant. Null until a context first
// enables batch invariance.
extern std::atomic<bool (*)()> batch_invariant_source;

// Sets batch_invariant() on this thread until the end of the scope.
class BatchInvariance {
 public:
  explicit BatchInvariance(bool on) : before_(batch_invariant()) { set_batch_invariant(on); }
  ~BatchInvariance() { set_batch_invariant(before_); }
  BatchInvariance(const BatchInvariance&) = delete;
  BatchInvariance& operator=(const BatchInvariance&) = delete;

 private:
  const bool before_;
};

class RunningOperator {
 public:
  RunningOperator() {
    if (running_operators.fetch_add(1, std::memory_order_acquire) < 0) wait_for_set_isa();
    if (bool (*const source)() = batch_invariant_source.load(std::memory_order_acquire))
      invariance_.emplace(source());
  }
  ~RunningOperator() { running_operators.fetch_sub(1, std::memory_order_release); }
  RunningOperator(const RunningOperator&) = delete;
  RunningOperator& operator=(const RunningOperator&) = delete;

 private:
  std::optional<BatchInvariance> invariance_;
};

template <auto operator_>
struct OnOneIsa;

template <class Result, class... Args, Result (*operator_)(Args...)>
struct OnOneIsa<operator_> {
  static Result run(Args... args) {
    const RunningOperator running;
    return operator_(std::forward<Args>(args)...);
  }
};

// Registers an operator; replaces TORCH_BOX. The instruction set and batch_invariant() cannot
// change during a call: packed layouts and scratch sizes depend on them.
#define TF_BOX(function) TORCH_BOX(&tf::OnOneIsa<function>::run)

// Per-thread buffer that grows and is reused, so that its pages are faulted in once. Aligned to at
// least 64 bytes. trim() frees it after calls that needed more than kKeep bytes. Under sanitizers
// each request gets a block of exactly its size, filled with NaN, so that reads of uninitialised
// memory and accesses beyond the end are detected.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  float* floats(int64_t count) {
    constexpr int64_t kMaxFloats = int64_t{1} << 57;
    if (count > kMaxFloats) throw_out_of_memory(std::numeric_limits<int64_t>::max());
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    if (bytes > size_ || (kExact && bytes != size_)) {
      std::free(memory_);
      memory_ = nullptr;
      size_ = 0;
      const size_t rounded = kExact ? bytes : (bytes + kAlign - 1) / kAlign * kAlign;
      const auto make = [&] { return posix_memalign(&memory_, kAlign, rounded) == 0; };
      if (!make() && !(release_cached() && make())) {
        memory_ = nullptr;
        throw_out_of_memory(static_cast<int64_t>(rounded));
      }
      if (kExact)
        std::memset(memory_, 0xff, rounded);
      else
        use_huge_pages(memory_, rounded);
      size_ = rounded;
    }
    return static_cast<float*>(memory_);
  }
  // rows * columns floats; the product may overflow 64 bits.
  float* floats(int64_t rows, int64_t columns) {
    int64_t count = 0;
    if (__builtin_mul_overflow(rows, columns, &count)) count = std::numeric_limits<int64_t>::max();
    return floats(count);
  }
  void trim() {
    if (size_ <= kKeep) return;
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }

 private:
  static constexpr size_t kKeep = size_t{64} << 20;
#ifdef TF_SANITIZE
  static constexpr bool kExact = true;
  static constexpr size_t kAlign = 64;
#else
  static constexpr bool kExact = false;
  static constexpr size_t kAlign = size_t{2} << 20;  // a huge page
#endif
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Scratch of the thread that runs a kernel, and of the calling thread for data that it shares with
// the worker threads.
inline Scratch& kernel_scratch() {
  thread_local Scratch scratch;
  return scratch;
}
constexpr int kSharedSlots = 10;
inline Scratch& shared_scratch(int slot) {
  thread_local Scratch scratch[kSharedSlots];
  return scratch[slot];
}
inline void trim_shared_scratch() {
  for (int slot = 0; slot < kSharedSlots; ++slot) shared_scratch(slot).trim();
}

inline char* bytes_of(Scratch& scratch, int64_t bytes) {
  return reinterpret_cast<char*>(scratch.floats((bytes + 3) / static_cast<int64_t>(sizeof(float))));
}

// Like torch::stable::parallel_for, which would replace an exception by one with another message.
// Worker threads get the calling thread's batch_invariant().
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  const bool invariant = batch_invariant();
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // the first one
  torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    const BatchInvariance same(invariant);
    try {
      f(first, last);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// Calls f(item) for each item with dynamic scheduling on torch's threads. Items write disjoint
// memory, so results do not depend on the order.
template <class F>
void for_each_item(int64_t items, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads <= 1 || items <= 1) {
    for (int64_t item = 0; item < items; ++item) f(item);
    return;
  }
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) f(item);
  });
}

// Like for_each_item(), but each thread calls `enter` before its first item. A thread starts with a
// contiguous range of its own, then steals remaining items of other threads.
template <class Enter, class F>
void for_each_item_with_init(int64_t items, const Enter& enter, const F& f) {
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  std::vector<Run> runs(static_cast<size_t>(threads));
  for (int64_t t = 0; t < threads; ++t) {
    runs[static_cast<size_t>(t)].next = items * t / threads;
    runs[static_cast<size_t>(t)].end = items * (t + 1) / threads;
  }
  parallel_for(0, threads, 1, [&](int64_t own, int64_t) {
    bool entered = false;
    for (int64_t t = 0; t < threads; ++t) {
      Run& run = runs[static_cast<size_t>((own + t) % threads)];
      for (int64_t item; (item = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
        if (!entered) enter();
        entered = true;
        f(item);
      }
    }
  });
}

// `like` names the argument whose dtype is required.
inline void check_type(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                       const char* like) {
  STD_TORCH_CHECK(tensor.is_cpu(), op, ": ", name, " must be on the CPU");
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " must ",
                  type == ScalarType::Float ? "be float32" : "have the dtype of ",
                  type == ScalarType::Float ? "" : like);
}
inline void check_float(const char* op, const char* name, const Tensor& tensor) {
  check_type(op, name, tensor, ScalarType::Float, "");
}

inline bool is_reduced_float(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::BFloat16 || tensor.scalar_type() == ScalarType::Half;
}

// Returns the dtype of a float32, bfloat16 or float16 argument; raises for others.
inline ScalarType checked_float_type(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(tensor.is_cpu() && (type == ScalarType::Float || is_reduced_float(tensor)), op,
                  ": ", name, " must be float32, bfloat16 or float16, and on the CPU");
  return type;
}

inline Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return Element::bfloat16;
    case ScalarType::Half:
      return Element::float16;
    default:
      return Element::float32;
  }
}

// Advances `first` by `elements`; nullptr stays nullptr.
inline const void* offset_ptr(const void* first, Element type, int64_t elements) {
  if (first == nullptr) return nullptr;
  return static_cast<const char*>(first) + elements * element_bytes(type);
}
inline void* offset_ptr(void* first, Element type, int64_t elements) {
  return const_cast<void*>(offset_ptr(static_cast<const void*>(first), type, elements));
}

// Validates the code of an activation (types.h).
inline int checked_activation(const char* op, int64_t activation) {
  STD_TORCH_CHECK(activation >= 0 && activation <= 4, op, ": there is no activation ", activation);
  return static_cast<int>(activation);
}

// p in [0, 1]; the seed, an int64 scalar, is read only if 0 < p < 1.
inline Dropout make_dropout(const char* op, double p, const std::optional<Tensor>& seed) {
  STD_TORCH_CHECK(p >= 0.0 && p <= 1.0, op, ": dropout_p must be between 0 and 1, not ", p);
  if (p == 0.0) return {};
  if (p == 1.0) return {true, 0, 0, 0.0f};  // keeps every element, multiplied by 0
  STD_TORCH_CHECK(seed.has_value(), op, ": dropout needs a seed");
  STD_TORCH_CHECK(seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
                  op, ": seed must be an int64 scalar on the CPU");
  return dropout_of(p, *static_cast<const int64_t*>(seed->const_data_ptr()));
}

// Data pointer of an optional result, nullptr if it is not wanted.
inline void* data_if(bool wanted, Tensor& tensor) {
  return wanted ? tensor.mutable_data_ptr() : nullptr;
}
inline float* floats_if(bool wanted, Tensor& tensor) {
  return static_cast<float*>(data_if(wanted, tensor));
}

inline float* mutable_floats(std::optional<Tensor>& tensor) {
  return tensor ? static_cast<float*>(tensor->mutable_data_ptr()) : nullptr;
}

inline const float* floats_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

}  // namespace tf
