// Errors of the CUDA runtime as a Status: the one conversion of the server. Needs no CUDA headers.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_STATUS_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

// OK for cudaSuccess. Else RESOURCE_EXHAUSTED if memory ran out and INTERNAL for every other
// `error`, a cudaError_t, with a message that names `call`. Of a sticky error, after which every
// later call fails too, IsDeviceLost (device_lost.h) is true.
absl::Status CudaStatus(int error, absl::string_view call);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_STATUS_H_
