// How long a device takes for an operation, by an estimate from its shape: for fairness among
// clients, and to bound launches.
#ifndef FLASHCORE_SERVER_ENGINE_WORK_H_
#define FLASHCORE_SERVER_ENGINE_WORK_H_

#include <memory>

#include "server/base/clock.h"
#include "server/device/device.h"
#include "server/kv/cut_launch.h"
#include "server/kv/launch.h"
#include "server/kv/operation.h"

namespace flashcore::server {

// The floating-point operations of what the mask leaves visible, or the bytes of the tensors and
// the K/V, whichever take longer; and DeviceSpeed::request. At least 1 ns.
//
// Takes the lengths of resident K/V from operation.sequence_lengths: those before the operation
// appends, or if it `is_launched` (SequenceStore::BeginLaunch) those after.
Nanoseconds EstimateWork(const AttendOperation& operation, bool is_launched,
                         const DeviceSpeed& speed);

// Cuts `*launch`, which has begun with one operation, into parts that `device` is expected to
// execute in about `max_part` each. Takes it over; null if that is one part.
std::shared_ptr<CutLaunch> Cut(const Device& device, Nanoseconds max_part, Launch* launch);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_WORK_H_
