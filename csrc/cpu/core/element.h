// Element types of the tensors that kernels take.
#pragma once

#include <cstdint>

namespace tf {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

enum class Element { boolean, float32, bfloat16, float16 };

constexpr long element_bytes(Element element) {
  return element == Element::boolean ? 1 : element == Element::float32 ? 4 : 2;
}

}  // namespace tf
