// Launches kernels: the stream, the launch, and the device properties that it needs. Independent of
// torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/device.cuh"

namespace tf::cuda {

#ifdef TF_SIMT
using Stream = void*;

// Few, so that in tests a block loops over several rows.
inline int multiprocessors() { return 2; }

template <class Args>
void launch(void (*kernel)(Args), dim3 grid, int threads, size_t shared, Stream, const Args& args) {
  simt::launch({reinterpret_cast<const void*>(kernel), &args, sizeof(Args)}, grid, threads, shared,
               [&] { kernel(args); });
}
#else
using Stream = cudaStream_t;

// Throws a CUDA error as std::runtime_error, which PyTorch converts to RuntimeError.
inline void check(cudaError_t code) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(code));
}

// Returns the number of multiprocessors of the current device. Cached, because querying the driver
// takes longer than a launch.
inline int multiprocessors() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0, count = 0;
  check(cudaGetDevice(&device));
  if (device < kDevices && known[device] != 0) return known[device];
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kDevices) known[device] = count;
  return count;
}

// `shared`: bytes of dynamic shared memory.
template <class Args>
void launch(void (*kernel)(Args), dim3 grid, int threads, size_t shared, Stream stream,
            const Args& args) {
  const void* function = reinterpret_cast<const void*>(kernel);
  constexpr size_t kDefaultLimit = 48 << 10;
  if (shared > kDefaultLimit)
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)));
  void* arguments[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernel(function, grid, dim3(threads), arguments, shared, stream));
}
#endif

enum class Element { float32, bfloat16, float16 };

inline int64_t size_of(Element element) { return element == Element::float32 ? 4 : 2; }

// Calls f(T{}) with the element type.
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
