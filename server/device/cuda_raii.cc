#include "server/device/cuda_raii.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/device/cuda_status.h"

namespace flashcore::server {
namespace {

// `owner`, if getting it went well.
template <class Owner>
absl::StatusOr<Owner> Checked(cudaError_t error, absl::string_view call, Owner owner) {
  if (absl::Status status = CudaStatus(error, call); !status.ok()) return status;
  return owner;
}

}  // namespace

absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes, absl::string_view purpose) {
  DeviceMemory memory;
  const cudaError_t error = cudaMalloc(memory.out(), bytes);
  return Checked(error, absl::StrCat("cudaMalloc of ", bytes, " bytes for ", purpose),
                 std::move(memory));
}

absl::StatusOr<PinnedMemory> AllocatePinned(size_t bytes, absl::string_view purpose) {
  PinnedMemory memory;
  const cudaError_t error =
      cudaHostAlloc(memory.out(), bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  return Checked(error, absl::StrCat("cudaHostAlloc of ", bytes, " bytes for ", purpose),
                 std::move(memory));
}

absl::StatusOr<CudaStream> MakeStream(StreamPriority priority) {
  int low = 0, high = 0;  // equal on a device without priorities
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&low, &high);
  CudaStream stream;
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(stream.out(), cudaStreamNonBlocking,
                                         priority == StreamPriority::kHigh ? high : low);
  }
  return Checked(error, "cudaStreamCreateWithPriority", std::move(stream));
}

absl::StatusOr<CudaEvent> MakeEvent(unsigned flags) {
  CudaEvent event;
  const cudaError_t error = cudaEventCreateWithFlags(event.out(), flags);
  return Checked(error, "cudaEventCreateWithFlags", std::move(event));
}

}  // namespace flashcore::server
