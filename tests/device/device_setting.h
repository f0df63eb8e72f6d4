// The devices that the tests of a whole engine run on.
#ifndef FLASHCORE_TESTS_DEVICE_DEVICE_SETTING_H_
#define FLASHCORE_TESTS_DEVICE_DEVICE_SETTING_H_

#include <cstddef>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/device/device.h"

namespace flashcore::server::testing {

// Superblock size in these tests: small, so that a small arena has many.
inline constexpr size_t kSuperblockBytes = size_t{64} << 10;

struct DeviceSetting {
  std::string name;           // of the test parameter; "cuda..." needs a GPU
  std::string (*why_none)();  // why this machine has no such device; empty if it has
  // A GPU may make fewer than `kv_hot_bytes` of `kv_bytes` hot: 0, if its L2 has no persisting
  // lines.
  std::unique_ptr<Device> (*make)(size_t kv_bytes, size_t kv_hot_bytes, const Clock* clock);
  // Copies from or to the device's K/V memory, or within it; complete on return. Any thread.
  void (*copy)(void* to, const void* from, size_t bytes);
};

inline std::ostream& operator<<(std::ostream& out, const DeviceSetting& setting) {
  return out << setting.name;
}

// "cpu"; in builds with CUDA also "cuda", and "cuda_in_parts", whose lanes need several passes for
// most batches.
std::vector<DeviceSetting> RealDevices();

// A `copy` for memory that the host can read and write.
void CopyOnHost(void* to, const void* from, size_t bytes);

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_DEVICE_SETTING_H_
