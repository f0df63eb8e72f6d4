// The devices of a server, each behind an engine of its own, and which of them does what.
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
#include "server/engine/engine.h"
#include "server/kv/sequence.h"
#include "server/request/request.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// A sequence lives on the device that it was created on, and its forks with it: its id says which,
// so that finding it takes no look-up and no lock of another device. A request runs where its
// sequences are; one with inline K/V only, wherever the fewest requests are.
//
// Devices share nothing. Each has its own queue, staging memory and K/V memory, and every limit and
// quota of Engine::Options holds for each.
//
// Thread-safe.
class Fleet {
 public:
  // Starts an engine for each of `devices`: at least one, at most SequenceId::kDevices, with
  // different ids, which serve the same dtypes and head_dims. metrics->device(i) is for devices[i].
  // options.lane_cores are those of all devices, one device after the other.
  // `clock` and `metrics` outlive the fleet.
  Fleet(const Engine::Options& options, std::vector<std::unique_ptr<Device>> devices,
        const Clock* clock, Metrics* metrics);
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  const std::vector<std::unique_ptr<Engine>>& engines() const { return engines_; }

  // Engine::Prepare on the device that the operation is for. INVALID_ARGUMENT also if it names
  // sequences of several devices.
  absl::Status Prepare(AttendOperation* operation);
  // Engine::Submit there.
  absl::Status Submit(AttendOperation* operation) { return operation->engine->Submit(operation); }

  // SequenceStore::Create on the device named `device_id`; INVALID_ARGUMENT if there is none.
  // Empty: on the device that has most room, or the next one if that refuses for want of it.
  absl::StatusOr<SequenceInfo> Create(const SequenceShape& shape, bool pin,
                                      absl::string_view client, absl::string_view device_id);

  // The engine whose store has the sequence, if any has.
  Engine& EngineOf(SequenceId id) const;
  const std::string& DeviceIdOf(SequenceId id) const { return EngineOf(id).device().info().id; }

  // Sequences of `client` behind the place `after` (0: all), by device, then oldest first. `limit`
  // is at least 1.
  struct Listing {
    std::vector<SequenceInfo> sequences;
    uint64_t next = 0;  // `after` of the next page; 0: there is none
  };
  Listing List(absl::string_view client, uint64_t after, size_t limit) const;

  const Clock& clock() const { return *clock_; }

 private:
  absl::StatusOr<Engine*> EngineFor(const AttendRequest& request);
  Engine* LeastLoaded();
  std::vector<Engine*> ByRoom() const;  // most first

  const Clock* const clock_;
  std::vector<std::unique_ptr<Engine>> engines_;  // [devices]
  std::atomic<size_t> turn_{0};                   // which one goes first among those loaded alike
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_FLEET_H_
