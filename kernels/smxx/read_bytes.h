// Reading device memory for nothing but the time that it takes.
#ifndef FLASHCORE_KERNELS_SMXX_READ_BYTES_H_
#define FLASHCORE_KERNELS_SMXX_READ_BYTES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flashcore::kernels {

// Enqueues a kernel that reads device memory [from, from + bytes) once, in words of 16 bytes: both
// are multiples of it, and there is at least one. `sink` is device memory, in practice never
// written.
cudaError_t ReadBytes(const void* from, size_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_READ_BYTES_H_
