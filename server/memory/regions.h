// The memory that one connection of the local socket has registered.
#ifndef FLASHCORE_SERVER_MEMORY_REGIONS_H_
#define FLASHCORE_SERVER_MEMORY_REGIONS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/memory/shared_region.h"

namespace flashcore::server {

// Only the connection's own requests look here, so nobody else finds its regions. Thread-safe.
class Regions {
 public:
  using Region = std::shared_ptr<const SharedRegion>;

  // Returns the region's id: 16 random bytes from the operating system.
  std::string Add(Region region) ABSL_LOCKS_EXCLUDED(mutex_);
  // NOT_FOUND.
  absl::StatusOr<Region> Find(absl::string_view id) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Null if there is none.
  Region Remove(absl::string_view id) ABSL_LOCKS_EXCLUDED(mutex_);
  void Clear() ABSL_LOCKS_EXCLUDED(mutex_);
  bool empty() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return regions_.empty();
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::pair<std::string, Region>> regions_ ABSL_GUARDED_BY(mutex_);  // by id; few
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_REGIONS_H_
