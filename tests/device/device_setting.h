// The devices that the tests of the whole core run on.
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

// Of the arenas of these tests, so that small ones have many.
inline constexpr size_t kSuperblockBytes = size_t{64} << 10;

struct DeviceSetting {
  std::string name;           // of the test parameter; what starts with "cuda" needs a GPU
  std::string (*why_none)();  // why there is no such device here; empty if there is
  // A GPU may make less than `kv_hot_bytes` of `kv_bytes` hot: nothing, if its L2 keeps nothing.
  std::unique_ptr<Device> (*make)(size_t kv_bytes, size_t kv_hot_bytes, const Clock* clock);
  // Copies from or to the device's K/V memory, or within it; complete on return. Any thread.
  void (*copy)(void* to, const void* from, size_t bytes);
};

inline std::ostream& operator<<(std::ostream& out, const DeviceSetting& setting) {
  return out << setting.name;
}

// "cpu"; in builds that have CUDA also "cuda", and "cuda_in_parts", whose lanes are too small for
// most batches.
std::vector<DeviceSetting> RealDevices();

// Of memory that the host can read and write.
void CopyOnHost(void* to, const void* from, size_t bytes);

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_DEVICE_SETTING_H_
