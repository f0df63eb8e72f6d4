// CUDA helpers of the benchmarks: error check, random inputs, a load for the tensor cores.
#ifndef FLASHCORE_KERNELS_BENCH_DEVICE_KERNELS_H_
#define FLASHCORE_KERNELS_BENCH_DEVICE_KERNELS_H_

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

// The same with E4M3 codes of numbers uniform in [-448, 448].
cudaError_t FillUniformE4M3(uint32_t seed, size_t count, void* codes, cudaStream_t stream);

// Pages of INT8 K and V, at least in their used part: codes uniform in [-127, 127], and scales of
// 1/128 to 1/85. `bytes` is even.
cudaError_t FillInt8Pages(uint32_t seed, int32_t head_dim, size_t bytes, void* pages,
                          cudaStream_t stream);

// Keeps the tensor cores of `multiprocessors` SMs busy with mma.sync.m16n8k16 (float16 inputs,
// float32 sums) from registers. Sets *flops to the work of one launch. `sink` is one float of
// device memory; it is never written, but the compiler cannot know that.
cudaError_t SpinTensorCores(int multiprocessors, float* sink, cudaStream_t stream, double* flops);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_DEVICE_KERNELS_H_
