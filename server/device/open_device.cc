#include "server/device/open_device.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace flashcore::server {
namespace {

absl::StatusOr<std::unique_ptr<Device>> OpenGpu(const CudaDevice::Options& options) {
#ifdef FLASHCORE_HAVE_CUDA
  return CudaDevice::Create(options);
#else
  (void)options;
  return absl::NotFoundError("this build has no CUDA device");
#endif
}

// The message of an error names the GPU.
absl::StatusOr<OpenedDevices> OpenGpus(absl::Span<const CudaDevice::Options> gpus) {
  OpenedDevices opened;
  std::vector<std::string> names;
  for (const CudaDevice::Options& options : gpus) {
    names.push_back(absl::StrCat("cuda:", options.ordinal));
    auto device = OpenGpu(options);
    if (!device.ok()) {
      return absl::Status(device.status().code(),
                          absl::StrCat(names.back(), ": ", device.status().message()));
    }
    opened.devices.push_back(*std::move(device));
  }
  opened.reason = absl::StrCat("--device=", absl::StrJoin(names, ","));
  return opened;
}

absl::StatusOr<OpenedDevices> OpenCpu(const CpuDevice::Options& options, const Clock* clock,
                                      std::string reason) {
  auto device = CpuDevice::Create(options, clock);
  if (!device.ok()) return device.status();
  OpenedDevices opened;
  opened.devices.push_back(*std::move(device));
  opened.reason = std::move(reason);
  return opened;
}

}  // namespace

absl::StatusOr<OpenedDevices> OpenDevices(const DeviceOptions& options, const Clock* clock) {
  using Kind = DeviceOptions::Kind;
  if (options.kind == Kind::kCpu) return OpenCpu(options.cpu, clock, "--device=cpu");
  if (options.kind == Kind::kCuda) return OpenGpus(options.cuda);
  auto opened = OpenGpus(absl::MakeConstSpan(options.cuda).first(1));
  if (opened.ok()) {
    opened->reason = "--device=auto";
  } else if (absl::IsNotFound(opened.status()) || absl::IsUnimplemented(opened.status())) {
    return OpenCpu(options.cpu, clock, absl::StrCat("--device=auto: ", opened.status().message()));
  }
  return opened;
}

}  // namespace flashcore::server
