// Reads device memory, to measure the time it takes.
#ifndef FLASHCORE_KERNELS_CUDA_READ_BYTES_H_
#define FLASHCORE_KERNELS_CUDA_READ_BYTES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flashcore::kernels {

// Launches a kernel that reads device memory [from, from + bytes) once. `from` and `bytes` are
// multiples of 16, bytes at least 16. `sink` is device memory; it is in practice never written.
cudaError_t ReadBytes(const void* from, size_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_READ_BYTES_H_
