// Common code of the operators: argument checks, so that a wrong call does not crash, and the
// stream. Tests build the same operators for CPU tensors, with kernels compiled by g++.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "cuda/launch.cuh"
#include "tensor_rows.h"
#include "types.h"

#ifdef TF_SIMT
#define TF_DISPATCH_KEY CPU
#else
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#define TF_DISPATCH_KEY CUDA
// Weak, so that the library loads and reports an error if PyTorch was built without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

namespace tf::cuda {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Guard that makes the tensor's device the current one; `stream` is PyTorch's current stream of
// that device.
class OnDevice {
 public:
#ifdef TF_SIMT
  explicit OnDevice(const Tensor&) {}
  Stream stream = nullptr;
#else
  explicit OnDevice(const Tensor& tensor) {
    const int device = tensor.get_device();
    STD_TORCH_CHECK(tensor.is_cuda(),
                    "transformer_fast: a CUDA kernel was called with a CPU tensor");
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "transformer_fast: this PyTorch was built without CUDA");
    check(cudaGetDevice(&before_));
    if (before_ != device) check(cudaSetDevice(device));
    void* found = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &found));
    stream = static_cast<cudaStream_t>(found);
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  Stream stream = nullptr;

 private:
  int before_ = 0;
  bool changed_ = false;
#endif
};

inline Element element_of(const char* op, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Element::float32;
    case ScalarType::BFloat16:
      return Element::bfloat16;
    case ScalarType::Half:
      return Element::float16;
    default:
      STD_TORCH_CHECK(false, op, ": the dtype must be float32, bfloat16 or float16");
  }
}

// Checks that the tensor has the device and dtype of `like`.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type() &&
                      tensor.is_cuda() == like.is_cuda() &&
                      tensor.get_device() == like.get_device(),
                  op, ": ", name, " must have the dtype and the device of the first tensor");
}

inline Tensor empty(const Tensor& like, std::vector<int64_t> sizes,
                    std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(like, {sizes.data(), sizes.size()}, dtype);
}
inline Tensor empty_contiguous(const Tensor& like) {
  const auto sizes = like.sizes();
  return torch::stable::new_empty(like, sizes);
}

// p must be in [0, 1]. The seed is an int64 in device memory, so that it needs no synchronisation.
inline Dropout make_dropout(const char* op, double p, const std::optional<Tensor>& seed,
                            const Tensor& like) {
  STD_TORCH_CHECK(p >= 0.0 && p <= 1.0, op, ": dropout_p must be in [0, 1], not ", p);
  if (p == 0.0) return {false, nullptr, 0, 1.0f};
  if (p == 1.0) return {true, nullptr, 0, 0.0f};
  STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long &&
                      seed->is_cuda() == like.is_cuda() && seed->get_device() == like.get_device(),
                  op, ": dropout needs a seed, one int64 on the device of the first tensor");
  return {true, static_cast<const int64_t*>(seed->const_data_ptr()), dropout_threshold(p),
          static_cast<float>(1.0 / (1.0 - p))};
}

// The number of blocks of a launch has 31 bits.
inline void check_rows(const char* op, int64_t rows) {
  STD_TORCH_CHECK(rows <= INT32_MAX, op, ": ", rows, " rows are more than one launch supports");
}

}  // namespace tf::cuda
