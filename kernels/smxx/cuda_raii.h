// Owners of what the CUDA runtime hands out.
#ifndef FLASHCORE_KERNELS_SMXX_CUDA_RAII_H_
#define FLASHCORE_KERNELS_SMXX_CUDA_RAII_H_

#include <cuda_runtime_api.h>

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
  // For the runtime to write a new handle to; destroys the one before.
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

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_CUDA_RAII_H_
