#include "server/memory/shared_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/telemetry/log.h"

namespace flashcore::server {

SharedMemory::SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
                           Gauge* regions)
    : options_(options), pinner_(pinner), bytes_gauge_(bytes), regions_gauge_(regions) {}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedMemory::Map(const FileDescriptor& file,
                                                                      uint64_t bytes,
                                                                      bool read_only,
                                                                      const std::string& client) {
  if (absl::Status status = SharedRegion::CheckFile(file, bytes); !status.ok()) return status;
  if (absl::Status status = Acquire(bytes, client); !status.ok()) return status;
  auto mapped = SharedRegion::Map(file, bytes, read_only);
  if (!mapped.ok()) {
    Release(bytes, client);
    return mapped.status();
  }
  std::byte* const data = (*mapped)->data();
  const absl::Status pinned = pinner_->PinHostMemory(data, bytes, read_only);
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

absl::Status SharedMemory::Acquire(size_t bytes, const std::string& client) {
  MutexLock lock(&mutex_);
  const auto found = accounts_.find(client);
  const Account account = found == accounts_.end() ? Account() : found->second;
  if (bytes > options_.total_bytes || used_bytes_ > options_.total_bytes - bytes) {
    const absl::Status full = absl::ResourceExhaustedError(
        absl::StrCat("bytes: ", bytes, " in addition to the ", used_bytes_,
                     " of all clients; at most ", options_.total_bytes, " are allowed"));
    if (bytes > options_.total_bytes) return WithTooLarge(full, bytes, options_.total_bytes);
    return WithInfo(full, reason::kServerFull);
  }
  if (options_.client_bytes > 0 && account.bytes + bytes > options_.client_bytes) {
    const absl::Status full = absl::ResourceExhaustedError(
        absl::StrCat("bytes: ", bytes, " in addition to the client's ", account.bytes, "; at most ",
                     options_.client_bytes, " are allowed per client"));
    if (bytes > options_.client_bytes) return WithTooLarge(full, bytes, options_.client_bytes);
    return WithInfo(full, reason::kQuotaExceeded,
                    {{"limit", "client_shared_memory_bytes"},
                     {"needed", bytes},
                     {"used", account.bytes},
                     {"allowed", options_.client_bytes}});
  }
  if (account.regions >= options_.client_regions) {
    return WithInfo(absl::ResourceExhaustedError(absl::StrCat(
                        "the client has ", account.regions, " regions of shared memory; at most ",
                        options_.client_regions, " are allowed per client")),
                    reason::kQuotaExceeded,
                    {{"limit", "client_shared_regions"},
                     {"needed", 1},
                     {"used", account.regions},
                     {"allowed", options_.client_regions}});
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
