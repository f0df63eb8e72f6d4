#include "kernels/cuda/branches.h"

namespace flashcore::kernels {

cudaError_t Branches::Create(int priority) {
  cudaError_t error = cudaEventCreateWithFlags(forked_.out(), cudaEventDisableTiming);
  for (int i = 0; i < kMost && error == cudaSuccess; ++i) {
    error = cudaStreamCreateWithPriority(streams_[i].out(), cudaStreamNonBlocking, priority);
    if (error == cudaSuccess) {
      error = cudaEventCreateWithFlags(done_[i].out(), cudaEventDisableTiming);
    }
  }
  return error;
}

cudaError_t Branches::Fork(cudaStream_t stream) const {
  return cudaEventRecord(forked_.get(), stream);
}

cudaError_t Branches::Begin(int branch, cudaStream_t* stream) const {
  *stream = streams_[branch].get();
  return cudaStreamWaitEvent(*stream, forked_.get(), 0);
}

cudaError_t Branches::Join(cudaStream_t stream, int count) const {
  cudaError_t first_error = cudaSuccess;
  for (int i = 0; i < count; ++i) {
    cudaError_t error = cudaEventRecord(done_[i].get(), streams_[i].get());
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, done_[i].get(), 0);
    if (first_error == cudaSuccess) first_error = error;
  }
  return first_error;
}

}  // namespace flashcore::kernels
