// CUDA errors as a Status, and memory, streams and events with an owner.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_RESOURCES_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_RESOURCES_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/branches.h"
#include "kernels/cuda/cuda_raii.h"

namespace flashcore::server {

using kernels::CudaEvent;
using kernels::CudaStream;
using kernels::DeviceMemory;
using kernels::PinnedMemory;

// OK if `error`, a cudaError_t, is cudaSuccess. RESOURCE_EXHAUSTED if memory ran out, INTERNAL
// otherwise; the message names `call`. IsDeviceLost (device.h) is true for errors after which every
// later call fails.
absl::Status CudaStatus(int error, absl::string_view call);

// When multiprocessors become free, work of a high-priority stream gets them first.
enum class StreamPriority { kHigh, kLow };

// Takes resources on the calling thread's current device. After an error it takes nothing more: a
// caller checks status() once, after its last call.
class CudaAllocator {
 public:
  // `purpose` completes "N bytes for ..." in errors.
  void Memory(size_t bytes, absl::string_view purpose, DeviceMemory* memory);
  // The same, of zeros.
  void ZeroedMemory(size_t bytes, absl::string_view purpose, DeviceMemory* memory);
  // The memory has the same address on the host and on every device.
  void Memory(size_t bytes, absl::string_view purpose, PinnedMemory* memory);
  // The stream does not wait for the legacy default stream.
  void Stream(StreamPriority priority, CudaStream* stream);
  void Event(unsigned flags, CudaEvent* event);
  void Branches(StreamPriority priority, kernels::Branches* branches);

  const absl::Status& status() const { return status_; }  // the first error

 private:
  int Value(StreamPriority priority);  // as CUDA takes it

  absl::Status status_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_RESOURCES_H_
