#include "server/engine/fleet.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace flashcore::server {
namespace {

constexpr const char* kRangeNames[] = {"query_range", "key_range", "value_range", "output_range",
                                       "lse_range"};
static_assert(std::size(kRangeNames) == kNumTensors);

constexpr size_t kMaxQuoted = 64;  // bytes of a client's string in an error message

// The used part of the K/V memory, in sixteenths.
size_t Fullness(const SequenceStore::Stats& stats) {
  const size_t used_bytes = stats.hot.used_bytes + stats.cold.used_bytes;
  const size_t capacity_bytes = stats.hot.capacity_bytes + stats.cold.capacity_bytes;
  return used_bytes * 16 / std::max<size_t>(capacity_bytes, 1);
}

}  // namespace

void ClientLease::End() {
  if (Fleet* const fleet = std::exchange(fleet_, nullptr); fleet != nullptr) fleet->CloseLease(id_);
}

Fleet::Fleet(const Engine::Options& options, std::vector<std::unique_ptr<Device>> devices,
             const Clock* clock, Metrics* metrics)
    : clock_(clock), input_waits_(clock) {
  auto core = options.lane_cores.begin();
  double slowest = std::numeric_limits<double>::infinity();
  for (const auto& device : devices) slowest = std::min(slowest, device->info().speed.flop_per_s);
  for (std::unique_ptr<Device>& device : devices) {
    Engine::Options own = options;
    if (!options.lane_cores.empty()) {
      own.lane_cores.assign(core, core + device->info().lanes);
      core += device->info().lanes;
    }
    if (own.max_request_flop == 0) own.max_request_flop = kDefaultRequestSeconds * slowest;
    own.sequences.device = engines_.size();
    own.sequences.devices = devices.size();
    own.input_waits = &input_waits_;
    own.max_waiting_bytes /= devices.size();  // all devices share the transport's memory
    engines_.push_back(
        std::make_unique<Engine>(own, std::move(device), clock, &metrics->device(engines_.size())));
  }
}

void Fleet::Admit(AttendOperation* operation, AlarmFactory make_alarm, AdmitDone done) {
  const absl::StatusOr<size_t> device = DeviceFor(operation->request);
  if (!device.ok()) {
    done(device.status());
    return;
  }
  operation->device = *device;
  engines_[*device]->Admit(operation, make_alarm, std::move(done));
}

absl::Status Fleet::Enqueue(AttendOperation* operation) {
  Engine* const engine = engines_[operation->device].get();
  const TimelinePoint& inputs = operation->request.inputs_ready;
  if (inputs.region == nullptr || inputs.reached()) return engine->Enqueue(operation);
  input_waits_.Add(operation, [engine, operation](absl::Status ready) {
    if (ready.ok()) ready = engine->Enqueue(operation);
    if (ready.ok()) return;
    auto done = std::move(operation->done);  // may destroy the operation
    done(std::move(ready));
  });
  engine->WakeLane();
  return absl::OkStatus();
}

void Fleet::EndAll(const absl::Status& status) {
  input_waits_.EndAll(status);
  for (const auto& engine : engines_) engine->EndAll(status);
}

int64_t Fleet::load() const {
  int64_t load = 0;
  for (const auto& engine : engines_) load += engine->load();
  return load;
}

absl::StatusOr<size_t> Fleet::DeviceFor(const AttendRequest& request) {
  std::optional<size_t> chosen;
  size_t chosen_by = 0;  // a span
  int first_range = -1;  // that chose it
  for (size_t i = 0; i < request.spans.size(); ++i) {
    // The request is not validated yet: the engine refuses a malformed id.
    const SequenceName& name = request.spans[i].sequence_id;
    if (!name.is_id()) continue;
    const size_t device = name.id().DeviceOf(engines_.size());
    if (!chosen.has_value()) {
      chosen = device;
      chosen_by = i;
    } else if (device != *chosen) {
      return absl::InvalidArgumentError(absl::StrCat(
          "spans[", i, "].sequence_id: names a sequence of ", engines_[device]->device().info().id,
          ", spans[", chosen_by, "] one of ", engines_[*chosen]->device().info().id,
          "; the sequences of one request must be on one device"));
    }
  }
  for (int i = kQuery; i < kNumTensors; ++i) {
    const SharedRegion* const region = request.ranges[i].region.get();
    if (region == nullptr || region->device() == SharedRegion::kHost) continue;
    const auto device = static_cast<size_t>(region->device());
    if (!chosen.has_value()) {
      chosen = device;
      first_range = i;
    } else if (device != *chosen) {
      return absl::InvalidArgumentError(absl::StrCat(
          kRangeNames[i], ": is memory of ", engines_[device]->device().info().id, ", but ",
          first_range < 0 ? absl::StrCat("spans[", chosen_by, "] names a sequence")
                          : absl::StrCat(kRangeNames[first_range], " is memory"),
          " of ", engines_[*chosen]->device().info().id));
    }
  }
  return chosen.has_value() ? *chosen : LeastLoaded();
}

absl::StatusOr<Device::SharedMemory> Fleet::AllocateShared(absl::string_view device_id,
                                                           size_t bytes) {
  const absl::StatusOr<size_t> device = device_id.empty() ? size_t{0} : DeviceNamed(device_id);
  if (!device.ok()) return device.status();
  absl::StatusOr<Device::SharedMemory> memory = engines_[*device]->device().AllocateShared(bytes);
  if (memory.ok()) memory->region->set_device(static_cast<int>(*device));
  return memory;
}

size_t Fleet::LeastLoaded() {
  const size_t first = turn_.fetch_add(1, std::memory_order_relaxed) % engines_.size();
  size_t least = first;
  int64_t least_load = engines_[first]->load();
  for (size_t i = 1; i < engines_.size(); ++i) {
    const size_t device = (first + i) % engines_.size();
    const int64_t load = engines_[device]->load();
    if (load >= least_load) continue;
    least = device;
    least_load = load;
  }
  return least;
}

absl::StatusOr<SequenceInfo> Fleet::Create(const SequenceShape& shape,
                                           const SequenceSettings& settings,
                                           const Identity& identity, absl::string_view device_id) {
  if (device_id.empty()) {
    absl::Status refusal;
    for (Engine* engine : ByFreeMemory()) {
      auto info = engine->sequences().Create(shape, settings, identity);
      if (info.ok() || !absl::IsResourceExhausted(info.status())) return info;
      refusal.Update(info.status());
    }
    return refusal;
  }
  const absl::StatusOr<size_t> device = DeviceNamed(device_id);
  if (!device.ok()) return device.status();
  return engines_[*device]->sequences().Create(shape, settings, identity);
}

absl::StatusOr<size_t> Fleet::DeviceNamed(absl::string_view device_id) const {
  std::vector<std::string> ids;
  for (const auto& engine : engines_) {
    ids.push_back(engine->device().info().id);
    if (ids.back() == device_id) return ids.size() - 1;
  }
  return absl::InvalidArgumentError(absl::StrCat("device_id: '", device_id.substr(0, kMaxQuoted),
                                                 "' is not one of ", absl::StrJoin(ids, ", ")));
}

// Each device knows the lease before the client does, and forgets it at one moment: a sequence that
// is created meanwhile is refused, or deleted with the others of its device.
ClientLease Fleet::OpenLease(const Identity& identity) {
  const LeaseId id = LeaseId::Random();
  for (const auto& engine : engines_) engine->sequences().OpenLease(id, identity);
  return {this, id};
}

void Fleet::CloseLease(LeaseId id) {
  for (const auto& engine : engines_) engine->CloseLease(id);
}

std::vector<Engine*> Fleet::ByFreeMemory() const {
  // Free memory decides first, because a sequence cannot move to another device. It is rounded,
  // because many sequences may be created before the first of them takes pages.
  std::vector<std::tuple<size_t, int64_t, size_t>> order;  // fullness, load, number
  for (const auto& engine : engines_) {
    const SequenceStore::Stats stats = engine->sequences().stats();
    order.emplace_back(Fullness(stats), static_cast<int64_t>(stats.sequences) + engine->load(),
                       order.size());
  }
  std::sort(order.begin(), order.end());
  std::vector<Engine*> engines;
  engines.reserve(order.size());
  for (const auto& [fullness, load, number] : order) engines.push_back(engines_[number].get());
  return engines;
}

Fleet::Listing Fleet::List(const Identity& identity, uint64_t after, const ListLimit& limit) const {
  Listing listing;
  const uint64_t devices = engines_.size();
  // A position is: position in the device's own listing * devices + device.
  uint64_t serial = after / devices;
  for (size_t device = after % devices; device < devices; ++device, serial = 0) {
    const size_t count = listing.sequences.size();
    ListLimit room = {limit.sequences - count, limit.bytes - std::min(limit.bytes, listing.bytes)};
    const bool full = count > 0 && (room.sequences == 0 || room.bytes == 0);
    if (full) room.sequences = 1;  // only find out whether there is one more
    SequenceStore::Listing part = engines_[device]->sequences().List(identity, serial, room);
    if (full) {
      if (part.sequences.empty()) continue;
      listing.next = device;
      return listing;
    }
    std::move(part.sequences.begin(), part.sequences.end(), std::back_inserter(listing.sequences));
    listing.bytes += part.bytes;
    if (part.next != 0) {
      listing.next = part.next * devices + device;
      return listing;
    }
  }
  return listing;
}

}  // namespace flashcore::server
