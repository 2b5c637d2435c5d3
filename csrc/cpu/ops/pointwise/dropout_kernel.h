// Dropout by itself, for what is made of several operators.
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct DropoutArgs {
  Element type;   // of x and y
  const void* x;  // (rows, n), contiguous
  void* y;        // likewise; may be x
  long n;
  Dropout dropout;
};

// Floats of scratch dropout_rows needs.
TF_KERNEL(long dropout_scratch(const DropoutArgs& args))

TF_KERNEL(void dropout_rows(const DropoutArgs& args, long begin, long end, float* scratch))

}  // namespace tf
