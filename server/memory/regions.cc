#include "server/memory/regions.h"

#include "server/base/error_info.h"
#include "server/base/random.h"

namespace flashcore::server {
namespace {

std::string RandomId() {
  std::string id(16, '\0');
  FillRandom(id.data(), id.size());
  return id;
}

}  // namespace

std::string Regions::Add(Region region) {
  std::string id = RandomId();
  MutexLock lock(&mutex_);
  regions_.emplace_back(id, std::move(region));
  return id;
}

absl::StatusOr<Regions::Region> Regions::Find(absl::string_view id) const {
  MutexLock lock(&mutex_);
  for (const auto& entry : regions_) {
    if (entry.first == id) return entry.second;
  }
  return WithInfo(absl::NotFoundError("region_id: this connection has registered no such region"),
                  reason::kRegionLost);
}

Regions::Region Regions::Remove(absl::string_view id) {
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

void Regions::Clear() {
  MutexLock lock(&mutex_);
  regions_.clear();
}

}  // namespace flashcore::server
