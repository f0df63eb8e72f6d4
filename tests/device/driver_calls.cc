// With the linker's --wrap=F every call of F calls __wrap_F, and __real_F is F itself.
#include "tests/device/driver_calls.h"

#include <cuda_runtime_api.h>

#include <atomic>

namespace {

std::atomic<int> calls{0};

}  // namespace

int flashcore::server::testing::DriverResourceCalls() { return calls; }

extern "C" {

cudaError_t __real_cudaMalloc(void** memory, size_t bytes);
cudaError_t __real_cudaFree(void* memory);
cudaError_t __real_cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t __real_cudaFreeHost(void* memory);
cudaError_t __real_cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t __real_cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t __real_cudaStreamDestroy(cudaStream_t stream);
cudaError_t __real_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t __real_cudaEventDestroy(cudaEvent_t event);

cudaError_t __wrap_cudaMalloc(void** memory, size_t bytes) {
  ++calls;
  return __real_cudaMalloc(memory, bytes);
}
cudaError_t __wrap_cudaFree(void* memory) {
  ++calls;
  return __real_cudaFree(memory);
}
cudaError_t __wrap_cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  ++calls;
  return __real_cudaHostAlloc(memory, bytes, flags);
}
cudaError_t __wrap_cudaFreeHost(void* memory) {
  ++calls;
  return __real_cudaFreeHost(memory);
}
cudaError_t __wrap_cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  ++calls;
  return __real_cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t __wrap_cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                int priority) {
  ++calls;
  return __real_cudaStreamCreateWithPriority(stream, flags, priority);
}
cudaError_t __wrap_cudaStreamDestroy(cudaStream_t stream) {
  ++calls;
  return __real_cudaStreamDestroy(stream);
}
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ++calls;
  return __real_cudaEventCreateWithFlags(event, flags);
}
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t event) {
  ++calls;
  return __real_cudaEventDestroy(event);
}

}  // extern "C"
