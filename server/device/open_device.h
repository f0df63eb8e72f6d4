// Opens the devices that a server computes on.
#ifndef FLASHCORE_SERVER_DEVICE_OPEN_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_OPEN_DEVICE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/device/cpu_device.h"
#include "server/device/cuda_device.h"
#include "server/device/device.h"

namespace flashcore::server {

struct DeviceOptions {
  enum class Kind { kAuto, kCpu, kCuda };
  // kAuto: the first of `cuda` if this process can use it, else the CPU. kCuda: all of `cuda`.
  Kind kind = Kind::kAuto;
  CpuDevice::Options cpu;
  std::vector<CudaDevice::Options> cuda = {{}};  // at least one, of different ordinals
};

struct OpenedDevices {
  std::vector<std::unique_ptr<Device>> devices;
  std::string reason;  // for the choice; for the log
};

// Returns the errors of CpuDevice::Create and CudaDevice::Create. With kCuda all GPUs must open.
// kAuto falls back to the CPU only if the GPU is missing or there are no kernels for it. `clock`
// outlives the devices.
absl::StatusOr<OpenedDevices> OpenDevices(const DeviceOptions& options, const Clock* clock);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_OPEN_DEVICE_H_
