// The devices of a server, each with its own engine, and the choice of the device for a request.
#ifndef FLASHCORE_SERVER_ENGINE_FLEET_H_
#define FLASHCORE_SERVER_ENGINE_FLEET_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/device/device.h"
#include "server/engine/client_lease.h"
#include "server/engine/engine.h"
#include "server/engine/input_waits.h"
#include "server/kv/operation.h"
#include "server/kv/sequence.h"
#include "server/request/request.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// A sequence stays on the device that it was created on, and so do its forks. Its id contains the
// device, so finding it takes no look-up. A request runs on the device of its sequences; one with
// inline K/V only, on the device with the fewest requests.
//
// Devices share nothing: each has its own queue, staging memory and K/V memory. Every limit and
// quota of Engine::Options holds per device.
//
// Thread-safe.
class Fleet {
 public:
  // Starts an engine for each of `devices`: at least one, with distinct ids and the
  // same dtypes and head_dims. metrics->device(i) belongs to devices[i]. options.lane_cores lists
  // the lanes of all devices, in their order. `clock` and `metrics` outlive the fleet.
  Fleet(const Engine::Options& options, std::vector<std::unique_ptr<Device>> devices,
        const Clock* clock, Metrics* metrics);
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  const std::vector<std::unique_ptr<Engine>>& engines() const { return engines_; }

  // Engine::Admit on the device of the operation's sequences and device memory; INVALID_ARGUMENT if
  // they are on several.
  void Admit(AttendOperation* operation, AlarmFactory make_alarm, AdmitDone done);
  // Engine::Enqueue on the device that admitted the operation, once its inputs are ready; also the
  // error of that wait goes to operation->done.
  absl::Status Enqueue(AttendOperation* operation);
  InputWaits& input_waits() { return input_waits_; }

  // Engine::EndAll of every device, for a drain that has no more time.
  void EndAll(const absl::Status& status);
  int64_t load() const;  // Engine::load() of all devices

  // SequenceStore::Create on the device named `device_id`; INVALID_ARGUMENT if there is none.
  // Empty: on the device with the most free memory, or the next one if that is full.
  absl::StatusOr<SequenceInfo> Create(const SequenceShape& shape, const SequenceSettings& settings,
                                      const Identity& identity, absl::string_view device_id);

  // Device::AllocateShared on the device named `device_id`, or the first if it is empty;
  // INVALID_ARGUMENT if there is none.
  absl::StatusOr<Device::SharedMemory> AllocateShared(absl::string_view device_id, size_t bytes);

  // A new lease of `identity`, on all devices. The fleet outlives it.
  ClientLease OpenLease(const Identity& identity);
  void CloseLease(LeaseId id);  // ClientLease calls it

  // The engine of the sequence's device, whether the sequence exists or not.
  Engine& EngineOf(SequenceId id) const { return *engines_[id.DeviceOf(engines_.size())]; }
  const std::string& DeviceIdOf(SequenceId id) const { return EngineOf(id).device().info().id; }

  // Sequences of `identity` within `limit`, by device, then oldest first. Begins after the position
  // `after`; 0: at the start.
  using Listing = SequenceStore::Listing;
  using ListLimit = SequenceStore::ListLimit;
  Listing List(const Identity& identity, uint64_t after, const ListLimit& limit) const;

  const Clock& clock() const { return *clock_; }

 private:
  absl::StatusOr<size_t> DeviceFor(const AttendRequest& request);
  absl::StatusOr<size_t> DeviceNamed(absl::string_view device_id) const;
  size_t LeastLoaded();
  std::vector<Engine*> ByFreeMemory() const;  // most free memory first

  const Clock* const clock_;
  InputWaits input_waits_;
  std::vector<std::unique_ptr<Engine>> engines_;  // [devices]
  std::atomic<size_t> turn_{0};                   // rotates the order among equally loaded devices
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_FLEET_H_
