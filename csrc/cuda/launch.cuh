// Starting kernels: the stream, the launch, and what is asked of the device before it. Free of
// torch.
#pragma once

#include <cstdint>

#include "cuda/device.cuh"
#ifndef TF_SIMT
#include "cuda/runtime.h"
#endif

namespace tf::cuda {

#ifdef TF_SIMT
using Stream = void*;

// Few, so that tests see programs that walk over several rows.
inline int multiprocessors() { return 2; }

template <class Args>
void launch(void (*kernel)(Args), dim3 grid, int threads, size_t shared, Stream, const Args& args) {
  simt::launch({reinterpret_cast<const void*>(kernel), &args, sizeof(Args)}, grid, threads, shared,
               [&] { kernel(args); });
}
#else
using Stream = cudaStream_t;

// Of the current device; asking the driver at every call would take longer than a launch.
inline int multiprocessors() {
  constexpr int kDevices = 64;
  static int known[kDevices];
  int device = 0, count = 0;
  check(cudaGetDevice(&device));
  if (device < kDevices && known[device] != 0) return known[device];
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kDevices) known[device] = count;
  return count;
}

template <class Args>
void launch(void (*kernel)(Args), dim3 grid, int threads, size_t shared, Stream stream,
            const Args& args) {
  void* arguments[] = {const_cast<Args*>(&args)};
  launch_function(reinterpret_cast<const void*>(kernel), grid, threads, shared, stream, arguments);
}
#endif

enum class Element { float32, bfloat16, float16 };

inline int64_t size_of(Element element) { return element == Element::float32 ? 4 : 2; }

// f(T{}) for the element type.
template <class F>
void by_element(Element element, const F& f) {
  switch (element) {
    case Element::float32:
      return f(float{});
    case Element::bfloat16:
      return f(bf16{});
    case Element::float16:
      return f(fp16{});
  }
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tf::cuda
