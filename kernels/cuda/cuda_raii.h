// Owners of CUDA handles, and a kernel launch that returns its error.
#ifndef FLASHCORE_KERNELS_CUDA_CUDA_RAII_H_
#define FLASHCORE_KERNELS_CUDA_CUDA_RAII_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace flashcore::kernels {

// Destroys its handle, unless that is null.
template <class T, cudaError_t (*kDestroy)(T)>
class CudaHandle {
 public:
  CudaHandle() = default;
  ~CudaHandle() { Reset(); }
  CudaHandle(CudaHandle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  CudaHandle& operator=(CudaHandle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  T get() const { return handle_; }
  T release() { return std::exchange(handle_, nullptr); }
  // Where the CUDA runtime writes a new handle. Destroys the current one.
  T* out() {
    Reset();
    return &handle_;
  }

 private:
  void Reset() {
    if (handle_ != nullptr) kDestroy(handle_);
    handle_ = nullptr;
  }

  T handle_ = nullptr;
};

using DeviceMemory = CudaHandle<void*, cudaFree>;
using PinnedMemory = CudaHandle<void*, cudaFreeHost>;
using CudaStream = CudaHandle<cudaStream_t, cudaStreamDestroy>;
using CudaEvent = CudaHandle<cudaEvent_t, cudaEventDestroy>;
using CudaGraph = CudaHandle<cudaGraph_t, cudaGraphDestroy>;
using CudaGraphExec = CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy>;

// Launches `kernel` on the cudaStream_t `stream` with `shared_bytes` of dynamic shared memory; more
// than 48 KB needs cudaFuncSetAttribute first. The grid must not be empty.
template <class... Params>
cudaError_t LaunchKernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                         void* stream, const Params&... params) {
  void* args[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), args,
                          shared_bytes, static_cast<cudaStream_t>(stream));
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_CUDA_RAII_H_
