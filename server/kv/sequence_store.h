// The resident K/V of one device. This is the thread-safe front of this folder; the work is done by
//
//   SequenceTable   which sequences exist; limits, eviction, expiry
//   LaunchBuilder   what a launch appends and reads; commit and rollback
//   PageMover       which pages move between the hot and the cold segment
//   PagePool        the pages: who shares them, who pays, when they are free
//   Arena           where a page lies in device memory
#ifndef FLASHCORE_SERVER_KV_SEQUENCE_STORE_H_
#define FLASHCORE_SERVER_KV_SEQUENCE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/kv/launch.h"
#include "server/kv/launch_builder.h"
#include "server/kv/operation.h"
#include "server/kv/page_pool.h"
#include "server/kv/placement.h"
#include "server/kv/sequence.h"
#include "server/kv/sequence_table.h"
#include "server/request/identity.h"
#include "server/request/request.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

// Every call takes effect at one moment, under one mutex, which is never held while K/V bytes move.
// Rows that a launch appends become visible at EndLaunch, or not at all. Pages that a running
// launch uses stay in place: a page that is dropped meanwhile is free only when every launch that
// may use it has ended. The Batcher's order keeps two launches from appending to one layer at a
// time.
//
// A sequence belongs to the identity that created or forked it. To another identity, it does not
// exist: NOT_FOUND, as for an unknown id. If the owner shares it with that identity, that identity
// may read and fork it; a change is PERMISSION_DENIED.
//
// Thread-safe. Owns the sequences and their page tables, but not the memory.
class SequenceStore {
 public:
  using Options = SequenceOptions;

  // Clock and metrics outlive the store.
  SequenceStore(const Options& options, const KvMemory& memory, const Clock* clock,
                DeviceMetrics* metrics);
  SequenceStore(const SequenceStore&) = delete;
  SequenceStore& operator=(const SequenceStore&) = delete;

  // A new sequence, charged to `identity`. INVALID_ARGUMENT for a shape beyond the limits and for
  // settings that contradict each other, PERMISSION_DENIED for a group that is not the identity's,
  // NOT_FOUND for a lease that is not open or not the identity's, RESOURCE_EXHAUSTED beyond a
  // quota.
  absl::StatusOr<SequenceInfo> Create(const SequenceShape& shape, const SequenceSettings& settings,
                                      const Identity& identity);

  // A new sequence that shares the pages of the first `length` rows of every layer (unset: of all
  // rows). It belongs and is charged to `identity`, whoever the parent belongs to.
  absl::StatusOr<SequenceInfo> Fork(SequenceId id, std::optional<uint64_t> length,
                                    const SequenceSettings& settings, const Identity& identity);

  // Keeps the first `length` rows of every layer. INVALID_ARGUMENT if a layer has fewer,
  // FAILED_PRECONDITION if layer 0 does not have `expected_length` rows.
  absl::StatusOr<SequenceInfo> Truncate(SequenceId id, uint64_t length,
                                        std::optional<uint64_t> expected_length,
                                        const Identity& identity);

  absl::Status Delete(SequenceId id, const Identity& identity);
  absl::StatusOr<SequenceInfo> Get(SequenceId id, const Identity& identity) const;

  // The sequences of `identity` behind position `after` (0: all), oldest first: at most
  // limit.sequences, and about limit.bytes, but at least one.
  struct Listing {
    std::vector<SequenceInfo> sequences;
    size_t bytes = 0;   // upper limit of the size of their SequenceInfo messages
    uint64_t next = 0;  // `after` for the rest of the list; 0: this is the end
  };
  struct ListLimit {
    size_t sequences = 1000;
    size_t bytes = size_t{1} << 20;
  };
  Listing List(const Identity& identity, uint64_t after, const ListLimit& limit) const;

  // Deletes the sequences that have been idle for too long.
  void ExpireIdle();

  // Gives a part of the memory that pages have left back to the system: call it, often, until it
  // returns false. Others get the mutex in between.
  bool GiveBackUnneeded();

  // A lease of `identity`, under a new id. Sequences can name it until CloseLease; then they are
  // orphans. Closing takes the same short time however many there are.
  void OpenLease(LeaseId id, const Identity& identity);
  void CloseLease(LeaseId id);
  // Deletes one orphan: call it until it returns false. Others get the mutex in between.
  bool DeleteOrphan();

  // Finds the sequences that the operation's spans name and checks that they fit the request, and
  // its work with them the limit. Sets operation->sequences, ->order, and ->sequence_lengths to the
  // current lengths. Does nothing if all K/V is inline. NOT_FOUND, INVALID_ARGUMENT,
  // PERMISSION_DENIED.
  absl::Status Lease(AttendOperation* operation);

  // Fills in `*launch`: allocates pages for what `operations` append, in their order, each
  // operation wholly or not at all, and sets their sequence_lengths. Operations that cannot be
  // launched are in launch->refused: NOT_FOUND if a sequence was deleted, FAILED_PRECONDITION if
  // expected_length differs, INVALID_ARGUMENT if the sequences have grown so much that the work
  // exceeds its limit, RESOURCE_EXHAUSTED if the memory or a quota is full.
  //
  // The first operation that `fits` says no to, and all behind it, are left alone. Returns the
  // number of those before. Asks nothing if all K/V is inline.
  size_t BeginLaunch(absl::Span<AttendOperation* const> operations, LaunchFit fits, Launch* launch);
  // The launch has ended. If `ok`, its appended rows become visible. If not, every sequence stays
  // as it was.
  void EndLaunch(const Launch& launch, bool ok);

  // At most `max_bytes` of pages that should be in the other segment; none until EndMoves has been
  // called for the previous ones. The caller copies them on the device and calls EndMoves. Launches
  // do not wait for that.
  PageMoves BeginMoves(size_t max_bytes);
  void EndMoves(const PageMoves& moves, bool ok);

  // See PagePool.
  bool ShouldResetPersistingL2();

  struct Stats {
    size_t sequences = 0;
    size_t pages = 0;
    size_t metadata_bytes = 0;
    struct OfSegment {
      size_t used_bytes = 0;      // by pages
      size_t capacity_bytes = 0;  // of the segment
    };
    OfSegment hot;
    OfSegment cold;
  };
  Stats stats() const;

  const Options& options() const { return options_; }

 private:
  friend class SequenceHold;

  SequenceInfo Describe(const Sequence& sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LostFrom(size_t first, const AttendOperation& operation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLease(const std::vector<SequencePtr>& sequences);

  const Options options_;
  const Clock* const clock_;

  mutable Mutex mutex_;
  PagePool pages_ ABSL_GUARDED_BY(mutex_);
  SequenceTable table_ ABSL_GUARDED_BY(mutex_);
  LaunchBuilder builder_ ABSL_GUARDED_BY(mutex_);
  PageMover mover_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_lease_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_SEQUENCE_STORE_H_
