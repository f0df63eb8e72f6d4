#include "server/device/cuda_driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

// Finds functions. After an error it finds no more.
class Finder {
 public:
  template <class Function>
  void Find(const char* name, Function** function) {
    if (!status_.ok()) return;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned kVersion = 12000;  // whose functions these are
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || found == nullptr) {
      status_ = absl::UnimplementedError(absl::StrCat("the CUDA driver has no ", name));
    }
    *function = reinterpret_cast<Function*>(found);
  }

  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

absl::StatusOr<CudaDriver> FindAll() {
  CudaDriver driver = {};
  Finder finder;
  finder.Find("cuGetErrorString", &driver.get_error_string);
  finder.Find("cuDeviceGet", &driver.get_device);
  finder.Find("cuDeviceGetAttribute", &driver.get_attribute);
  finder.Find("cuMemGetAllocationGranularity", &driver.get_granularity);
  finder.Find("cuMemCreate", &driver.create);
  finder.Find("cuMemRelease", &driver.release);
  finder.Find("cuMemExportToShareableHandle", &driver.export_handle);
  finder.Find("cuMemAddressReserve", &driver.reserve);
  finder.Find("cuMemAddressFree", &driver.free_reserved);
  finder.Find("cuMemMap", &driver.map);
  finder.Find("cuMemUnmap", &driver.unmap);
  finder.Find("cuMemSetAccess", &driver.set_access);
  finder.Find("cuStreamBatchMemOp", &driver.batch_mem_op);
  if (!finder.status().ok()) return finder.status();
  return driver;
}

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Get() {
  static const absl::StatusOr<CudaDriver> driver = FindAll();
  if (!driver.ok()) return driver.status();
  return &*driver;
}

absl::Status CudaDriver::StatusOf(CUresult result, absl::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  get_error_string(result, &text);
  const std::string message = absl::StrCat(call, ": ", text == nullptr ? "unknown error" : text,
                                           " (", static_cast<int>(result), ")");
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    return WithInfo(absl::ResourceExhaustedError(message), reason::kServerFull);
  }
  return absl::InternalError(message);
}

}  // namespace flashcore::server
