// Memory of a GPU that a client on this host maps, too. Needs CUDA.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_SHARED_MEMORY_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_SHARED_MEMORY_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "server/device/device.h"

namespace flashcore::server {

// At least `bytes` of GPU `ordinal`, the calling thread's current device; see
// Device::AllocateShared. The file is a handle of the driver's virtual memory management: it passes
// between containers, unlike handles of cudaIpcGetMemHandle, and keeps the memory as long as any
// process has it open or maps it.
absl::StatusOr<Device::SharedMemory> AllocateCudaShared(int ordinal, size_t bytes);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_SHARED_MEMORY_H_
