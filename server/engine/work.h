// How long a device takes for an operation: an estimate from its shape, for fairness among clients
// and to bound launches.
#ifndef FLASHCORE_SERVER_ENGINE_WORK_H_
#define FLASHCORE_SERVER_ENGINE_WORK_H_

#include "server/base/clock.h"
#include "server/device/device.h"
#include "server/request/request.h"

namespace flashcore::server {

// The floating-point operations of what the mask leaves visible, or the bytes of the tensors and
// the K/V, whichever take longer; and DeviceSpeed::request. At least 1 ns.
//
// Takes the lengths of resident K/V from operation.sequence_lengths: those before the operation
// appends, or if it `is_launched` (SequenceStore::BeginLaunch) those after.
Nanoseconds EstimateWork(const AttendOperation& operation, bool is_launched,
                         const DeviceSpeed& speed);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_WORK_H_
