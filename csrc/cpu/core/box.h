// Registers the CPU operators: TF_BOX replaces TORCH_BOX, so that the instruction set cannot change
// during a call. Packed layouts and scratch sizes depend on it.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <utility>

namespace tf {

// Number of running operators; negative while set_isa() stores its choice.
extern std::atomic<long> running_operators;

void wait_for_set_isa();

class RunningOperator {
 public:
  RunningOperator() {
    if (running_operators.fetch_add(1, std::memory_order_acquire) < 0) wait_for_set_isa();
  }
  ~RunningOperator() { running_operators.fetch_sub(1, std::memory_order_release); }
  RunningOperator(const RunningOperator&) = delete;
  RunningOperator& operator=(const RunningOperator&) = delete;
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

}  // namespace tf

#define TF_BOX(function) TORCH_BOX(&tf::OnOneIsa<function>::run)
