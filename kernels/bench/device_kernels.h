// The device code of the benchmark itself.
#ifndef FLASHCORE_KERNELS_BENCH_DEVICE_KERNELS_H_
#define FLASHCORE_KERNELS_BENCH_DEVICE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Fills elements[count] with numbers uniform in [-1, 1] that depend on seed and place alone.
cudaError_t FillUniform(DType dtype, uint32_t seed, size_t count, void* elements,
                        cudaStream_t stream);

// The same with E4M3 codes of numbers uniform in [-448, 448].
cudaError_t FillUniformE4M3(uint32_t seed, size_t count, void* codes, cudaStream_t stream);

// Keeps the tensor cores of `multiprocessors` SMs busy with mma.sync.m16n8k16 (float16 inputs,
// float32 sums) from registers. *flops is the work of one launch. `sink` is one float of device
// memory, in practice never written.
cudaError_t SpinTensorCores(int multiprocessors, float* sink, cudaStream_t stream, double* flops);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_DEVICE_KERNELS_H_
