// Inner loops of the roofline probes; probe.cpp adds threads and clocks.
#pragma once

#include "cpu/core/isa.h"

namespace tf {

// Runs independent multiply-adds for `iterations` rounds; returns the number of flops done.
TF_KERNEL_AMX(double fma_flops(long iterations))

// The same with bf16 pairs accumulated in fp32: vdpbf16ps, or AMX tiles in the amx build. Returns 0
// where the instruction set has neither.
TF_KERNEL_AMX(double bf16_dot_flops(long iterations))

// Sum of data[0 .. count): reads each cache line once.
TF_KERNEL_AMX(float sum_floats(const float* data, long count))

}  // namespace tf
