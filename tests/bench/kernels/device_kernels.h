// CUDA helpers of the benchmarks: error check, random inputs, a load for the tensor cores.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_DEVICE_KERNELS_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_DEVICE_KERNELS_H_

#include <cuda_runtime_api.h>
#include <errno.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Ends the program with status 1 unless `error` is cudaSuccess. `what` completes "cannot ...".
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: cannot %s: %s (%s)\n", program_invocation_short_name, what,
               cudaGetErrorString(error), cudaGetErrorName(error));
  std::exit(1);
}

// Fills elements[count] with numbers uniform in [-1, 1] that depend only on seed and index.
cudaError_t FillUniform(DType dtype, uint32_t seed, size_t count, void* elements,
                        cudaStream_t stream);

// Pages of 8-bit K and V, at least in their used part: codes of numbers that are uniform up to the
// largest code, and scales of 1/128 to 1/85 (INT8) or 1/512 to 1/341 (E4M3). `bytes` is even.
cudaError_t Fill8BitPages(KvDType kv_dtype, uint32_t seed, int32_t head_dim, size_t bytes,
                          void* pages, cudaStream_t stream);

// Keeps the tensor cores of `multiprocessors` SMs busy with mma.sync.m16n8k16 (float16 inputs,
// float32 sums) from registers. Sets *flops to the work of one launch. `sink` is one float of
// device memory; it is never written, but the compiler cannot know that.
cudaError_t SpinTensorCores(int multiprocessors, float* sink, cudaStream_t stream, double* flops);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_DEVICE_KERNELS_H_
