#include "server/engine/fleet.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace flashcore::server {
namespace {

// A place in a listing: in the high bits that in the listing of one store, in the low ones which.
constexpr uint64_t kDevices = SequenceId::kDevices;

constexpr size_t kMaxQuoted = 64;  // bytes of what a client sent, in a message

// How full the K/V memory is, in sixteenths.
size_t Fullness(const SequenceStore::Stats& stats) {
  const size_t used_bytes = stats.hot.used_bytes + stats.cold.used_bytes;
  const size_t capacity_bytes = stats.hot.capacity_bytes + stats.cold.capacity_bytes;
  return used_bytes * 16 / std::max<size_t>(capacity_bytes, 1);
}

}  // namespace

Fleet::Fleet(const Engine::Options& options, std::vector<std::unique_ptr<Device>> devices,
             const Clock* clock, Metrics* metrics)
    : clock_(clock) {
  auto core = options.lane_cores.begin();
  for (std::unique_ptr<Device>& device : devices) {
    Engine::Options own = options;
    if (!options.lane_cores.empty()) {
      own.lane_cores.assign(core, core + device->info().lanes);
      core += device->info().lanes;
    }
    own.sequences.device = static_cast<uint8_t>(engines_.size());
    own.max_waiting_bytes /= devices.size();  // what the transport holds is not a device's
    engines_.push_back(
        std::make_unique<Engine>(own, std::move(device), clock, &metrics->device(engines_.size())));
  }
}

Engine& Fleet::EngineOf(SequenceId id) const {
  // No store has a sequence of a device that there is none of: any can say so.
  return *engines_[id.device() < engines_.size() ? id.device() : 0];
}

absl::Status Fleet::Prepare(AttendOperation* operation) {
  const absl::StatusOr<Engine*> engine = EngineFor(operation->request);
  if (!engine.ok()) return engine.status();
  operation->engine = *engine;
  return operation->engine->Prepare(operation);
}

absl::StatusOr<Engine*> Fleet::EngineFor(const AttendRequest& request) {
  Engine* chosen = nullptr;
  size_t chosen_by = 0;
  for (size_t i = 0; i < request.spans.size(); ++i) {
    // Not yet validated: what is no id is the engine's to refuse.
    const std::optional<SequenceId> id = SequenceId::FromBytes(request.spans[i].sequence_id);
    if (!id.has_value()) continue;
    Engine* const engine = &EngineOf(*id);
    if (chosen == nullptr) {
      chosen = engine;
      chosen_by = i;
    } else if (engine != chosen) {
      return absl::InvalidArgumentError(absl::StrCat(
          "spans[", i, "].sequence_id: names a sequence of ", engine->device().info().id,
          ", spans[", chosen_by, "] one of ", chosen->device().info().id,
          "; the sequences of one request must be on one device"));
    }
  }
  return chosen != nullptr ? chosen : LeastLoaded();
}

Engine* Fleet::LeastLoaded() {
  const size_t first = turn_.fetch_add(1, std::memory_order_relaxed);
  Engine* least = nullptr;
  int64_t least_load = 0;
  for (size_t i = 0; i < engines_.size(); ++i) {
    Engine* const engine = engines_[(first + i) % engines_.size()].get();
    const int64_t load = engine->load();
    if (least != nullptr && load >= least_load) continue;
    least = engine;
    least_load = load;
  }
  return least;
}

absl::StatusOr<SequenceInfo> Fleet::Create(const SequenceShape& shape, bool pin,
                                           absl::string_view client, absl::string_view device_id) {
  if (device_id.empty()) {
    absl::Status refusal;
    for (Engine* engine : ByRoom()) {
      auto info = engine->sequences().Create(shape, pin, client);
      if (info.ok() || !absl::IsResourceExhausted(info.status())) return info;
      refusal.Update(info.status());
    }
    return refusal;
  }
  std::vector<std::string> ids;
  for (const auto& engine : engines_) {
    ids.push_back(engine->device().info().id);
    if (ids.back() == device_id) return engine->sequences().Create(shape, pin, client);
  }
  return absl::InvalidArgumentError(absl::StrCat("device_id: '", device_id.substr(0, kMaxQuoted),
                                                 "' is not one of ", absl::StrJoin(ids, ", ")));
}

std::vector<Engine*> Fleet::ByRoom() const {
  // Memory comes first, because a sequence that has outgrown its device cannot move; but only in
  // steps, because sequences take pages later, and many may be created before the first has any.
  std::vector<std::tuple<size_t, int64_t, size_t>> order;  // fullness, load, number
  for (const auto& engine : engines_) {
    const SequenceStore::Stats stats = engine->sequences().stats();
    order.emplace_back(Fullness(stats), static_cast<int64_t>(stats.sequences) + engine->load(),
                       order.size());
  }
  std::sort(order.begin(), order.end());
  std::vector<Engine*> engines;
  for (const auto& [fullness, load, number] : order) engines.push_back(engines_[number].get());
  return engines;
}

Fleet::Listing Fleet::List(absl::string_view client, uint64_t after, size_t limit) const {
  Listing listing;
  uint64_t serial = after / kDevices;
  for (size_t device = after % kDevices; device < engines_.size(); ++device, serial = 0) {
    const size_t room = limit - listing.sequences.size();
    SequenceStore::Listing part =
        engines_[device]->sequences().List(client, serial, std::max<size_t>(room, 1));
    if (room == 0) {  // is there one more?
      if (part.sequences.empty()) continue;
      listing.next = device;
      return listing;
    }
    std::move(part.sequences.begin(), part.sequences.end(), std::back_inserter(listing.sequences));
    if (part.next != 0) {
      listing.next = part.next * kDevices + device;
      return listing;
    }
  }
  return listing;
}

}  // namespace flashcore::server
