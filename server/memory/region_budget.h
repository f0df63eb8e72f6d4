// Limits of one kind of memory that clients share with the server.
#ifndef FLASHCORE_SERVER_MEMORY_REGION_BUDGET_H_
#define FLASHCORE_SERVER_MEMORY_REGION_BUDGET_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/memory/shared_region.h"
#include "server/sharing/shares.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// Keeps regions of clients within limits. A client beyond its own limit is refused. If all share
// too much together, whoever shares the most gives back its newest regions, until there is room for
// somebody who shares less (Shares). Memory that is given back stays until its last use ends, so
// for a moment as much again as the limits of all clients may be in use. Outlives its regions.
// Thread-safe.
class RegionBudget {
 public:
  // Ends whoever has the region, soon: it has to be given back. Called at most once, by a Share for
  // another client, on its thread and without locks.
  using OnGiveBack = absl::AnyInvocable<void()>;
  using Region = std::unique_ptr<SharedRegion>;

  struct Options {
    size_t total_bytes = size_t{1} << 30;               // of all regions
    size_t total_regions = FaultGuard::kMaxGuards / 2;  // of mapped files, each is guarded
    size_t client_bytes = 0;                            // of all regions of a client; 0: no limit
    size_t client_regions = 256;                        // per client
  };
  // For errors: the memory, and the fields of Limits that QUOTA_EXCEEDED names.
  struct Names {
    const char* memory;
    const char* client_bytes;
    const char* client_regions;
  };

  // `bytes` and `regions` follow the regions. They outlive this.
  RegionBudget(const Options& options, const Names& names, Gauge* bytes, Gauge* regions);
  RegionBudget(const RegionBudget&) = delete;
  RegionBudget& operator=(const RegionBudget&) = delete;

  const Options& options() const { return options_; }

  // The region of `bytes` that `make` returns, for `client`. It counts for the client until the
  // last reference to it is gone, or it is given back. RESOURCE_EXHAUSTED beyond a limit: of the
  // client, or of all clients if none of them shares more than this one would, or if too much that
  // was given back is still in use. Other errors are those of `make`.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Share(
      size_t bytes, const std::string& client, OnGiveBack on_give_back,
      absl::FunctionRef<absl::StatusOr<Region>()> make) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The charge for one region, until it is gone. The item is of bytes_; it is not taken any
  // more once the region is given back.
  struct Use : Shares::Item {
    std::string client_name;
    size_t bytes = 0;
    OnGiveBack on_give_back;
    Shares::Client* regions = nullptr;
  };

  // `ended`: call these when it returns, whatever it returns.
  absl::Status Acquire(Use* use, std::vector<OnGiveBack>* ended) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(Use* use) ABSL_LOCKS_EXCLUDED(mutex_);
  void Take(Use* use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Give(Use* use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the client may have `bytes` more, in one more region.
  absl::Status CheckOwnLimits(const std::string& client, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the newest of clients that must give back until everything fits, `newcomer` included.
  // After an error it does not, and the caller takes what is in `*given` again.
  absl::Status MakeRoom(const Use& newcomer, std::vector<Use*>* given)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Use* GiveNewest(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Names names_;
  Gauge* const bytes_gauge_;
  Gauge* const regions_gauge_;
  mutable Mutex mutex_;
  Shares bytes_ ABSL_GUARDED_BY(mutex_);    // by client, as the regions
  Shares regions_ ABSL_GUARDED_BY(mutex_);  // without items; those of bytes_ are the same
  // Given back and still in use.
  size_t leaving_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t leaving_regions_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_REGION_BUDGET_H_
