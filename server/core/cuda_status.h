// Errors of the CUDA runtime as a Status: the one conversion of the server. Needs no CUDA headers.
#ifndef FLASHCORE_SERVER_CORE_CUDA_STATUS_H_
#define FLASHCORE_SERVER_CORE_CUDA_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

// OK for cudaSuccess. Else RESOURCE_EXHAUSTED if memory ran out and INTERNAL for every other
// `error`, a cudaError_t, with a message that names `call`.
absl::Status CudaStatus(int error, absl::string_view call);

// Whether `status` is that of an error after which this process can use the device no more: every
// later call fails too.
bool IsSticky(const absl::Status& status);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_CUDA_STATUS_H_
