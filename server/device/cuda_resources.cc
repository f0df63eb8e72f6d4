#include "server/device/cuda_resources.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/device/device.h"

namespace flashcore::server {
namespace {

// The CUDA runtime documents that a process cannot use the device after these errors.
bool LosesTheDevice(cudaError_t error) {
  switch (error) {
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorMpsClientTerminated:
    case cudaErrorNvlinkUncorrectable:
#if CUDART_VERSION >= 13000
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
#endif
      return true;
    default:
      return false;
  }
}

}  // namespace

absl::Status CudaStatus(int code, absl::string_view call) {
  const auto error = static_cast<cudaError_t>(code);
  if (error == cudaSuccess) return absl::OkStatus();
  const bool is_lost = LosesTheDevice(error);
  const std::string message =
      absl::StrCat(call, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
                   is_lost ? "; the device is lost to this process" : "");
  if (error == cudaErrorMemoryAllocation) {
    return WithInfo(absl::ResourceExhaustedError(message), reason::kServerFull);
  }
  absl::Status status = absl::InternalError(message);
  if (is_lost) MarkDeviceLost(&status);
  return status;
}

void CudaAllocator::Memory(size_t bytes, absl::string_view purpose, DeviceMemory* memory) {
  if (!status_.ok()) return;
  status_ = CudaStatus(cudaMalloc(memory->out(), bytes),
                       absl::StrCat("cudaMalloc of ", bytes, " bytes for ", purpose));
}

void CudaAllocator::ZeroedMemory(size_t bytes, absl::string_view purpose, DeviceMemory* memory) {
  Memory(bytes, purpose, memory);
  if (!status_.ok()) return;
  status_ = CudaStatus(cudaMemset(memory->get(), 0, bytes), "cudaMemset");
}

void CudaAllocator::Memory(size_t bytes, absl::string_view purpose, PinnedMemory* memory) {
  if (!status_.ok()) return;
  status_ =
      CudaStatus(cudaHostAlloc(memory->out(), bytes, cudaHostAllocPortable | cudaHostAllocMapped),
                 absl::StrCat("cudaHostAlloc of ", bytes, " bytes for ", purpose));
}

int CudaAllocator::Value(StreamPriority priority) {
  int low = 0, high = 0;  // equal on a device without priorities
  if (status_.ok()) {
    status_ = CudaStatus(cudaDeviceGetStreamPriorityRange(&low, &high),
                         "cudaDeviceGetStreamPriorityRange");
  }
  return priority == StreamPriority::kHigh ? high : low;
}

void CudaAllocator::Stream(StreamPriority priority, CudaStream* stream) {
  const int value = Value(priority);
  if (!status_.ok()) return;
  status_ = CudaStatus(cudaStreamCreateWithPriority(stream->out(), cudaStreamNonBlocking, value),
                       "cudaStreamCreateWithPriority");
}

void CudaAllocator::Branches(StreamPriority priority, kernels::Branches* branches) {
  const int value = Value(priority);
  if (status_.ok()) status_ = CudaStatus(branches->Create(value), "streams of branches");
}

void CudaAllocator::Event(unsigned flags, CudaEvent* event) {
  if (!status_.ok()) return;
  status_ = CudaStatus(cudaEventCreateWithFlags(event->out(), flags), "cudaEventCreateWithFlags");
}

}  // namespace flashcore::server
