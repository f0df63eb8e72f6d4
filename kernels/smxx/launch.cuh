// Launching a kernel with its error as a return value.
#ifndef FLASHCORE_KERNELS_SMXX_LAUNCH_CUH_
#define FLASHCORE_KERNELS_SMXX_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>

namespace flashcore::kernels {

// Launches `kernel` on the cudaStream_t `stream` with `shared_bytes` of dynamic shared memory. More
// than 48 KB of it must have been allowed before. The grid must not be empty.
template <class... Params>
cudaError_t LaunchKernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                         void* stream, Params... params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_LAUNCH_CUH_
