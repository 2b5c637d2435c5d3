// Roofline probes: measured peak rates of this machine, the denominators of benchmark results.
#pragma once

#include <cstddef>

#include "cpu/core/isa.h"

namespace tf {

// All probes run `threads` threads at once for 50 to 100 ms and return the best of a few rounds.

// fp32 multiply-adds (separate multiply and add in the x86-64 build, which has no FMA), in GFLOP/s.
double probe_fma(int threads, Isa isa);

// bf16 dot products accumulated in fp32, in GFLOP/s. Throws std::invalid_argument for an
// instruction set without them.
double probe_bf16_dot(int threads, Isa isa);

// Dot products of unsigned by signed 8 bits, summed in int32. Throws likewise.
double probe_int8_dot(int threads, Isa isa);

// Reading a buffer of `bytes` again and again, each thread its own share, in GB/s.
double probe_read_bandwidth(std::size_t bytes, int threads);

// memcpy of `bytes` to another buffer of that size; bytes read plus bytes written, in GB/s.
double probe_copy_bandwidth(std::size_t bytes, int threads);

// The inner loops; the probes add threads and clocks.
//
// Runs independent multiply-adds for `iterations` rounds; returns the number of flops done.
TF_KERNEL_INT8(double fma_flops(Index iterations))

// The same with bf16 pairs accumulated in fp32: vdpbf16ps, or AMX tiles in the amx build. Requires
// that the instruction set has either.
TF_KERNEL_INT8(double bf16_dot_flops(Index iterations))

// The same with four 8-bit products summed in int32: vpdpbusd, or AMX tiles.
TF_KERNEL_INT8(double int8_dot_flops(Index iterations))

// Sum of data[0 .. count): reads each cache line once.
TF_KERNEL_INT8(float sum_floats(const float* data, Index count))

}  // namespace tf
