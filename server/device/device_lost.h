// Errors after which a device runs nothing more in this process.
#ifndef FLASHCORE_SERVER_DEVICE_DEVICE_LOST_H_
#define FLASHCORE_SERVER_DEVICE_DEVICE_LOST_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace flashcore::server {

inline constexpr char kDeviceLostPayload[] = "flashcore/device_lost";

inline void MarkDeviceLost(absl::Status* status) {
  status->SetPayload(kDeviceLostPayload, absl::Cord());
}

inline bool IsDeviceLost(const absl::Status& status) {
  return status.GetPayload(kDeviceLostPayload).has_value();
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_DEVICE_LOST_H_
