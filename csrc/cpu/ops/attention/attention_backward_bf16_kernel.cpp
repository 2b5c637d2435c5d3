#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_backward_rows.h"

namespace tf::TF_ISA {
namespace {

template <class T>
bool keys(const AttentionBackwardArgs& args, long b, long key_head, long begin, long end,
          float* part, void* scratch) {
  return on_tiles<T>(args, scratch, [&](const BackwardWorkspace<T>& work) {
    return loop_keys<Bf16Products<T>>(args, work, keys_per_tile(args), b, key_head, begin, end,
                                      part);
  });
}

template <class T>
bool mask(const AttentionBackwardArgs& args, long b, long h, long tile, long begin, long end,
          void* scratch) {
  return on_tiles<T>(args, scratch, [&](const BackwardWorkspace<T>& work) {
    return loop_mask<Bf16Products<T>>(args, work, keys_per_tile(args), b, h, tile, begin, end);
  });
}

// Calls f(T{}) for the type of the call; float with AMX only.
template <class F>
auto by_type([[maybe_unused]] const AttentionBackwardArgs& args, const F& f) {
#if defined(__AMX_BF16__)
  if (args.type == Element::float32) return f(float{});
#endif
  return f(BFloat16{});
}

}  // namespace

long bf16_attention_backward_keys(const AttentionBackwardArgs& args) { return keys_per_tile(args); }

long bf16_attention_backward_queries() { return kRows; }

long bf16_attention_backward_scratch(const AttentionBackwardArgs& args) {
  return by_type(args,
                 [&](auto type) { return BackwardWorkspace<decltype(type)>(args, nullptr).bytes; });
}

bool bf16_attention_backward(const AttentionBackwardArgs& args, long b, long key_head, long begin,
                             long end, float* part, void* scratch) {
  return by_type(args, [&](auto type) {
    return keys<decltype(type)>(args, b, key_head, begin, end, part, scratch);
  });
}

bool bf16_attention_mask_backward(const AttentionBackwardArgs& args, long b, long h, long tile,
                                  long begin, long end, void* scratch) {
  return by_type(
      args, [&](auto type) { return mask<decltype(type)>(args, b, h, tile, begin, end, scratch); });
}

}  // namespace tf::TF_ISA
