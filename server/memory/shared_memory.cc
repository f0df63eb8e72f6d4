#include "server/memory/shared_memory.h"

#include <sys/random.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/telemetry/log.h"

namespace flashcore::server {

SharedMemory::SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
                           Gauge* regions)
    : options_(options), pinner_(pinner), bytes_gauge_(bytes), regions_gauge_(regions) {}

std::string SharedMemory::RandomId() {
  std::string id(kIdBytes, '\0');
  // getrandom never returns fewer than 16 bytes; without a random id nothing is secret.
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) std::abort();
  return id;
}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedMemory::Map(SharedSegment segment,
                                                                      const std::string& client) {
  const size_t bytes = segment.bytes();
  if (absl::Status status = Acquire(bytes, client); !status.ok()) return status;
  auto mapped = SharedRegion::Map(std::move(segment));
  if (!mapped.ok()) {
    Release(bytes, client);
    return mapped.status();
  }
  std::byte* const data = (*mapped)->data();
  const absl::Status pinned = pinner_->PinHostMemory(data, bytes, (*mapped)->read_only());
  (*mapped)->set_in_reach(pinned.ok());
  if (!pinned.ok()) {
    LogWarning("shared memory is not pinned: it is copied in pieces, and never read in place",
               {{"bytes", bytes}, {"error", pinned.message()}});
  }
  const auto unmap = [this, bytes, client](const SharedRegion* region) {
    if (region->in_reach()) pinner_->UnpinHostMemory(region->data());
    delete region;
    Release(bytes, client);
  };
  return std::shared_ptr<const SharedRegion>(mapped->release(), unmap);
}

absl::StatusOr<std::string> SharedMemory::Register(SharedSegment segment,
                                                   const std::string& client) {
  auto region = Map(std::move(segment), client);
  if (!region.ok()) return region.status();
  std::string id = RandomId();
  MutexLock lock(&mutex_);
  regions_.emplace(id, Registration{client, *std::move(region)});
  return id;
}

void SharedMemory::Unregister(const std::string& id) {
  std::shared_ptr<const SharedRegion> region;  // its deleter takes the lock: destroy it last
  MutexLock lock(&mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end()) return;
  region = std::move(found->second.region);
  regions_.erase(found);
}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedMemory::Find(
    absl::string_view id, absl::string_view client) const {
  MutexLock lock(&mutex_);
  const auto found = regions_.find(id);
  if (found != regions_.end() && found->second.client == client) return found->second.region;
  return absl::NotFoundError("region_id: no such region is registered");
}

absl::Status SharedMemory::Acquire(size_t bytes, const std::string& client) {
  MutexLock lock(&mutex_);
  const auto found = accounts_.find(client);
  const Account account = found == accounts_.end() ? Account() : found->second;
  if (bytes > options_.total_bytes || used_bytes_ > options_.total_bytes - bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("bytes: ", bytes, " in addition to the ",
                                                     used_bytes_, " of all clients; at most ",
                                                     options_.total_bytes, " are allowed"));
  }
  if (options_.client_bytes > 0 && account.bytes + bytes > options_.client_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("bytes: ", bytes, " in addition to the client's ", account.bytes, "; at most ",
                     options_.client_bytes, " are allowed per client"));
  }
  if (account.regions >= options_.client_regions) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the client has ", account.regions, " regions of shared memory; at most ",
                     options_.client_regions, " are allowed per client"));
  }
  used_bytes_ += bytes;
  accounts_[client] = {account.bytes + bytes, account.regions + 1};
  bytes_gauge_->Increment(static_cast<double>(bytes));
  regions_gauge_->Increment();
  return absl::OkStatus();
}

void SharedMemory::Release(size_t bytes, const std::string& client) {
  MutexLock lock(&mutex_);
  used_bytes_ -= bytes;
  const auto account = accounts_.find(client);
  account->second.bytes -= bytes;
  if (--account->second.regions == 0) accounts_.erase(account);
  bytes_gauge_->Decrement(static_cast<double>(bytes));
  regions_gauge_->Decrement();
}

}  // namespace flashcore::server
