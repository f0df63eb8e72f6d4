// Which device a server computes on.
#ifndef FLASHCORE_SERVER_CORE_OPEN_DEVICE_H_
#define FLASHCORE_SERVER_CORE_OPEN_DEVICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/core/clock.h"
#include "server/core/cpu_device.h"
#include "server/core/cuda_device.h"
#include "server/core/device.h"

namespace flashcore::server {

struct DeviceOptions {
  enum class Kind { kAuto, kCpu, kCuda };
  Kind kind = Kind::kAuto;  // kAuto: GPU cuda.ordinal if it can be used, else the CPU
  CpuDevice::Options cpu;
  CudaDevice::Options cuda;
};

struct OpenedDevice {
  std::unique_ptr<Device> device;
  std::string reason;  // why this one, for the log
};

// The errors of CpuDevice::Create and CudaDevice::Create. A GPU that was asked for by name is never
// replaced by the CPU, and one that kAuto finds only if it is missing, or there are no kernels for
// it. `clock` outlives the device.
absl::StatusOr<OpenedDevice> OpenDevice(const DeviceOptions& options, const Clock* clock);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_OPEN_DEVICE_H_
