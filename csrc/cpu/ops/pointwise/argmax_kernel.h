// Where the largest element of each row is, the first of equals; NaN counts as larger than all.
#pragma once

#include <cstdint>

#include "cpu/core/element.h"
#include "cpu/core/isa.h"

namespace tf {

struct ArgmaxArgs {
  Element type;  // float32, bfloat16 or float16
  const void* x;
  long columns, stride;  // columns > 0; elements from row to row
  int64_t* place;
};
TF_KERNEL(void argmax_rows(const ArgmaxArgs& args, long begin, long end))

}  // namespace tf
