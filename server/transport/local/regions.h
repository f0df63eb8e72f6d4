// The memory that one connection of the local socket has registered.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_REGIONS_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_REGIONS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/memory/shared_memory.h"

namespace flashcore::server {

// Only the connection's own requests look here, so nobody else finds its regions. Thread-safe.
class Regions final : public RegionSource {
 public:
  using Region = std::shared_ptr<const SharedRegion>;

  // Returns the region's id.
  std::string Add(Region region) {
    std::string id = SharedMemory::RandomId();
    MutexLock lock(&mutex_);
    regions_.emplace_back(id, std::move(region));
    return id;
  }
  // Null if there is none.
  Region Remove(absl::string_view id) {
    MutexLock lock(&mutex_);
    for (auto& entry : regions_) {
      if (entry.first != id) continue;
      Region region = std::move(entry.second);
      entry = std::move(regions_.back());
      regions_.pop_back();
      return region;
    }
    return nullptr;
  }
  void Clear() {
    MutexLock lock(&mutex_);
    regions_.clear();
  }
  absl::StatusOr<Region> Find(absl::string_view id, absl::string_view /*client*/) const override {
    MutexLock lock(&mutex_);
    for (const auto& entry : regions_) {
      if (entry.first == id) return entry.second;
    }
    return absl::NotFoundError("region_id: this connection has registered no such region");
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::pair<std::string, Region>> regions_ ABSL_GUARDED_BY(mutex_);  // by id; few
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_REGIONS_H_
