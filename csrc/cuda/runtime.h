// What is asked of CUDA's runtime, in plain C++: launches by address, and kernels that lie in the
// library as cubins.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace tf::cuda {

// What CUDA said was wrong, as an exception of the kind that torch makes a RuntimeError of.
inline void check(cudaError_t code) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(code));
}

// `shared`: bytes of dynamic shared memory.
inline void launch_function(const void* function, dim3 grid, int threads, size_t shared,
                            cudaStream_t stream, void** arguments) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared > kWithoutAsking)
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)));
  check(cudaLaunchKernel(function, grid, dim3(threads), arguments, shared, stream));
}

// While one lives, its thread may load code although a CUDA graph is being captured, by whatever
// thread. That touches no stream, but unless it is told otherwise CUDA refuses it, and the capture
// is lost.
class DespiteCapture {
 public:
  DespiteCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~DespiteCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  DespiteCapture(const DespiteCapture&) = delete;
  DespiteCapture& operator=(const DespiteCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

#if CUDART_VERSION >= 12080
// The kernel of a cubin is loaded when it is launched first, for all devices and until the process
// ends. The device has it from its own first launch on.
inline void launch_cubin(const void* code, const char* name, dim3 grid, int threads, size_t shared,
                         cudaStream_t stream, void** arguments) {
  static std::mutex guard;
  static std::unordered_map<const void*, cudaKernel_t> loaded;
  const DespiteCapture here;
  cudaKernel_t kernel = nullptr;
  {
    const std::lock_guard<std::mutex> lock(guard);
    cudaKernel_t& known = loaded[code];
    if (known == nullptr) {
      cudaLibrary_t library = nullptr;
      check(cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0));
      check(cudaLibraryGetKernel(&known, library, name));
    }
    kernel = known;
  }
  launch_function(reinterpret_cast<const void*>(kernel), grid, threads, shared, stream, arguments);
}
#endif

}  // namespace tf::cuda
