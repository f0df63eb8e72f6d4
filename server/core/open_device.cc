#include "server/core/open_device.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

absl::StatusOr<std::unique_ptr<Device>> OpenCuda(const CudaDevice::Options& options) {
#ifdef FLASHCORE_HAVE_CUDA
  return CudaDevice::Create(options);
#else
  (void)options;
  return absl::NotFoundError("this build has no CUDA device");
#endif
}

}  // namespace

absl::StatusOr<OpenedDevice> OpenDevice(const DeviceOptions& options, const Clock* clock) {
  using Kind = DeviceOptions::Kind;
  std::string reason = "--device=cpu";
  if (options.kind != Kind::kCpu) {
    const std::string name = absl::StrCat("cuda:", options.cuda.ordinal);
    const bool is_auto = options.kind == Kind::kAuto;
    auto device = OpenCuda(options.cuda);
    if (device.ok()) {
      return OpenedDevice{*std::move(device), absl::StrCat("--device=", is_auto ? "auto" : name)};
    }
    const absl::Status& status = device.status();
    const bool has_no_use = absl::IsNotFound(status) || absl::IsUnimplemented(status);
    if (!is_auto || !has_no_use) {
      return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
    }
    reason = absl::StrCat("--device=auto: ", status.message());
  }
  auto device = CpuDevice::Create(options.cpu, clock);
  if (!device.ok()) return device.status();
  return OpenedDevice{*std::move(device), std::move(reason)};
}

}  // namespace flashcore::server
