// A kernel's first launches during the capture of a CUDA graph, on a runtime that refuses what
// CUDA's refuses then. Prints what came of it.
#include "cuda/runtime.h"

#include <cstdio>

namespace {

cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
bool capturing = true, fails = false;
int libraries = 0, launches = 0;

// Code reaches the device at a kernel's first use.
cudaError_t unsafe() {
  if (!capturing || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  return cudaErrorStreamCaptureUnsupported;
}

}  // namespace

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorStreamCaptureUnsupported ? "unsupported while capturing" : "no memory";
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**,
                                unsigned, cudaLibraryOption*, void**, unsigned) {
  if (fails) return cudaErrorMemoryAllocation;
  ++libraries;
  *library = reinterpret_cast<cudaLibrary_t>(const_cast<void*>(code));
  return unsafe();
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char*) {
  *kernel = reinterpret_cast<cudaKernel_t>(library);
  return unsafe();
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return unsafe(); }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  ++launches;
  return unsafe();
}

int main() {
  const unsigned char codes[3] = {};
  for (int i : {0, 1, 0, 2, 2, 2}) {
    fails = i == 2 && launches < 4;
    try {
      tf::cuda::launch_cubin(&codes[i], "kernel", dim3(1), 32, 64 << 10, nullptr, nullptr);
    } catch (const std::runtime_error& error) {
      std::printf("%s\n", error.what());
      ++launches;
    }
    if (mode != cudaStreamCaptureModeGlobal) std::printf("the mode is another one\n");
  }
  std::printf("%d libraries, %d launches\n", libraries, launches);
}
