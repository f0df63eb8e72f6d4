// Device time of work on a stream.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_TIMING_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_TIMING_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "tests/bench/kernels/kernel_run.h"

namespace flashcore::kernels {

// Microseconds.
struct Percentiles {
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
};

// Percentiles of one or more times, by nearest rank.
Percentiles Summarise(std::vector<double> us);

// Microseconds of a launch. A round's time is the mean of its launches.
struct RoundTimes {
  double median = 0;
  double least = 0;
  double most = 0;
};

// A round replays a CUDA graph of `launches` launches, on the sets of `run` in turn.
RoundTimes TimeLaunches(const KernelRun& run, int launches, int rounds, cudaStream_t stream);

// Measured peak rates of the device.
struct Ceilings {
  double tensor_tflops = 0;  // mma.sync.m16n8k16, float16 inputs, float32 sums, from registers
  double copy_gbps = 0;      // copy of 1 GiB within device memory: bytes read plus bytes written
};
Ceilings MeasureCeilings(int multiprocessors, cudaStream_t stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_TIMING_H_
