// Functions of the CUDA driver that the runtime does not have. Needs CUDA.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_DRIVER_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_DRIVER_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

// The runtime finds them in the driver, so that the server starts on machines without one. All take
// effect on the calling thread's current device.
struct CudaDriver {
  CUresult (*get_error_string)(CUresult, const char**);
  CUresult (*get_device)(CUdevice*, int);
  CUresult (*get_attribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*get_granularity)(size_t*, const CUmemAllocationProp*,
                              CUmemAllocationGranularity_flags);
  CUresult (*create)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*,
                     unsigned long long);
  CUresult (*release)(CUmemGenericAllocationHandle);
  CUresult (*export_handle)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                            unsigned long long);
  CUresult (*reserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
  CUresult (*free_reserved)(CUdeviceptr, size_t);
  CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
  CUresult (*unmap)(CUdeviceptr, size_t);
  CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
  CUresult (*batch_mem_op)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

  // UNIMPLEMENTED if the driver lacks one. Any thread.
  static absl::StatusOr<const CudaDriver*> Get();

  // OK if `result` is CUDA_SUCCESS. RESOURCE_EXHAUSTED if memory ran out, INTERNAL otherwise; the
  // message names `call`.
  absl::Status StatusOf(CUresult result, absl::string_view call) const;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_DRIVER_H_
