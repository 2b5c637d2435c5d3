// Keys and values that come next. For kernel files only.
#pragma once

#include "cpu/gemm/spread.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"

namespace tf::TF_ISA {
namespace {

// Fetches the keys and values that this thread will pack next, as far as can be told, into the
// second-level cache: some rows at a time.
template <class T>
class NextKeys {
 public:
  // Next to those of a head; shared out over `turns` calls.
  NextKeys(const AttentionArgs& args, long b, long key_head, long turns) : args_(args) {
    // More would drive out what is being worked on.
    constexpr long kMost = 256 * 1024;
    const long next = b * args.key_heads + key_head + args.next_head;
    const long bytes = args.keys * (args.size + args.value_size) * static_cast<long>(sizeof(T));
    if (args.next_head == 0 || bytes > kMost || args.key_starts != nullptr ||
        next >= args.batch * args.key_heads)
      return;
    b = next / args.key_heads;
    key_head = next % args.key_heads;
    k_ = static_cast<const T*>(args.key) + head_offset(nullptr, args.key_stride, b, key_head);
    v_ = static_cast<const T*>(args.value) + head_offset(nullptr, args.value_stride, b, key_head);
    rows_ =
        args.key_lengths == nullptr ? args.keys : most(0, least(args.keys, args.key_lengths[b]));
    share_ = (rows_ + turns - 1) / most(1, turns);
  }

  void some() {
    for (const long until = least(rows_, at_ + share_); at_ < until; ++at_) {
      fetch_row(k_ + at_ * args_.key_stride[2], args_.size);
      fetch_row(v_ + at_ * args_.value_stride[2], args_.value_size);
    }
  }

 private:
  const AttentionArgs& args_;
  const T *k_ = nullptr, *v_ = nullptr;
  long rows_ = 0, share_ = 0, at_ = 0;
};

}  // namespace
}  // namespace tf::TF_ISA
