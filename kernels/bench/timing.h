// Device time of work on a stream.
#ifndef FLASHCORE_KERNELS_BENCH_TIMING_H_
#define FLASHCORE_KERNELS_BENCH_TIMING_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "kernels/bench/kernel_run.h"

namespace flashcore::kernels {

// Microseconds.
struct Percentiles {
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
};

// Of at least one time.
Percentiles Summarise(std::vector<double> us);

// Enqueues `work` on `stream` 10 times, then `rounds` times in pairs whose second is timed.
Percentiles TimeRounds(int rounds, cudaStream_t stream, const std::function<void()>& work);

// Time of one of `launches` launches, on the sets of `run` in turn, of a CUDA graph that is
// replayed `rounds` times.
Percentiles TimeLaunches(const KernelRun& run, int launches, int rounds, cudaStream_t stream);

// What the device can do at best, in units of 1e12 floating point operations and 1e9 bytes a
// second.
struct Ceilings {
  double tensor_tflops = 0;  // mma.sync.m16n8k16, float16 inputs, float32 sums, from registers
  double copy_gbps = 0;      // copying 1 GiB within device memory: bytes read plus bytes written
};
Ceilings MeasureCeilings(int multiprocessors, cudaStream_t stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_TIMING_H_
