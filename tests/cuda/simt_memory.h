// Memory for launches under a sanitizer. It ends where the tensors do, holds small numbers or NaN,
// and outputs are checked for NaN.
#pragma once

#include <memory>
#include <type_traits>

#include "cuda/launch.cuh"

namespace tf::cuda {

inline uint32_t state = 1;
inline float draw() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int>(state >> 8) % 4001 - 2000) / 1000.0f;
}

template <class T>
struct Array {
  std::unique_ptr<T[]> data;
  size_t size;

  explicit Array(size_t size, bool drawn = true) : data(new T[size]), size(size) {
    for (size_t i = 0; i < size; ++i) assign(data[i], drawn ? draw() : NAN);
  }
  operator T*() const { return data.get(); }
  void check(const char* what) const {
    for (size_t i = 0; i < size; ++i)
      if (std::isnan(to_float(data[i]))) {
        std::fprintf(stderr, "wrong: %s[%zu] is NaN\n", what, i);
        std::exit(3);
      }
  }
};

template <class T>
constexpr Element kType = sizeof(T) == 4            ? Element::float32
                          : std::is_same_v<T, bf16> ? Element::bfloat16
                                                    : Element::float16;

}  // namespace tf::cuda
