#include "server/device/cuda_status.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/device/device_lost.h"

namespace flashcore::server {
namespace {

// After which, as the runtime documents, a process has to be started anew to use the device.
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
  const bool sticky = LosesTheDevice(error);
  const std::string message =
      absl::StrCat(call, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
                   sticky ? "; the device is lost to this process" : "");
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  absl::Status status = absl::InternalError(message);
  if (sticky) MarkDeviceLost(&status);
  return status;
}

}  // namespace flashcore::server
