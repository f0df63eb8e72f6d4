// What the CUDA runtime hands out, as owners, and the errors of getting it as a Status.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_RAII_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_RAII_H_

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/smxx/cuda_raii.h"

namespace flashcore::server {

using kernels::CudaEvent;
using kernels::CudaStream;
using kernels::DeviceMemory;
using kernels::PinnedMemory;

// All on the calling thread's current device. `purpose` completes "N bytes for ..." in errors.
absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes, absl::string_view purpose);
// At the same address on the host and on every device.
absl::StatusOr<PinnedMemory> AllocatePinned(size_t bytes, absl::string_view purpose);
// Does not wait for the legacy default stream. As the device has a free place, work of a kHigh one
// gets it before that of a kLow one.
enum class StreamPriority { kHigh, kLow };
absl::StatusOr<CudaStream> MakeStream(StreamPriority priority = StreamPriority::kHigh);
// Keeps the time, unless `flags` say otherwise.
absl::StatusOr<CudaEvent> MakeEvent(unsigned flags = cudaEventDefault);

// `value`, into `*to` if there is one.
template <class T>
absl::Status Store(absl::StatusOr<T> value, T* to) {
  if (value.ok()) *to = *std::move(value);
  return value.status();
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_RAII_H_
