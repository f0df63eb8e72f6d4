// The resident K/V of one device: which sequences there are, which pages are theirs, who pays for
// them, and when they go.
#ifndef FLASHCORE_SERVER_KV_SEQUENCE_STORE_H_
#define FLASHCORE_SERVER_KV_SEQUENCE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/kv/arena.h"
#include "server/kv/client_accounts.h"
#include "server/kv/launch.h"
#include "server/kv/sequence.h"
#include "server/request/request.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

struct SpanTensors;  // spans.h

// Every operation on sequences takes effect at one moment, under one lock that is never held while
// K/V bytes move. A launch takes what it reads and appends to at Begin, and what it appended
// becomes visible at End, or not at all. What a running launch uses stays where it is: pages that
// are dropped meanwhile are free only when every launch that may use them has ended.
//
// Thread-safe. The Batcher's order keeps two launches from appending to one layer at a time.
class SequenceStore {
 public:
  enum class Eviction { kNone, kLru };

  struct Options {
    uint8_t device = 0;  // its number, which the ids of its sequences tell
    // What a full arena does: refuse, or drop the sequence that was used longest ago and is not in
    // use.
    Eviction evict = Eviction::kNone;
    Nanoseconds idle_timeout{0};         // after which an unused sequence goes; 0: never
    size_t client_kv_bytes = 0;          // of pages that one client's sequences took; 0: no limit
    size_t client_sequences = 0;         // of one client; 0: no limit
    uint32_t max_layers = 1024;          // of one sequence
    uint32_t max_heads = 1024;           // KV heads of one sequence
    std::vector<kernels::DType> dtypes;  // those that the device has kernels for
    std::vector<uint32_t> head_dims;     // likewise
    // Of the host's records of sequences and their page tables: forks are cheap, but not free.
    size_t metadata_bytes = size_t{256} << 20;
    size_t superblock_bytes = size_t{4} << 20;  // of the arena; no page is larger
  };

  // Clock and metrics outlive the store.
  SequenceStore(const Options& options, const KvMemory& memory, const Clock* clock,
                DeviceMetrics* metrics);
  ~SequenceStore();
  SequenceStore(const SequenceStore&) = delete;
  SequenceStore& operator=(const SequenceStore&) = delete;

  // `client` pays for the sequence. INVALID_ARGUMENT for a shape beyond the limits,
  // RESOURCE_EXHAUSTED beyond a quota.
  absl::StatusOr<SequenceInfo> Create(const SequenceShape& shape, bool pin,
                                      absl::string_view client) ABSL_LOCKS_EXCLUDED(mutex_);

  // A sequence with the first `length` rows of every layer (unset: all of each), sharing the pages.
  absl::StatusOr<SequenceInfo> Fork(SequenceId id, std::optional<uint64_t> length, bool pin,
                                    absl::string_view client) ABSL_LOCKS_EXCLUDED(mutex_);

  // Keeps the first `length` rows of every layer; a layer with fewer is INVALID_ARGUMENT.
  // `expected_length` is that of layer 0, else FAILED_PRECONDITION.
  absl::StatusOr<SequenceInfo> Truncate(SequenceId id, uint64_t length,
                                        std::optional<uint64_t> expected_length)
      ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status Delete(SequenceId id) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<SequenceInfo> Get(SequenceId id) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Sequences of `client` that were created after the one with number `after`, oldest first.
  struct Listing {
    std::vector<SequenceInfo> sequences;
    uint64_t next = 0;  // `after` of the next page; 0: there is none
  };
  Listing List(absl::string_view client, uint64_t after, size_t limit) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Deletes what has been idle for too long.
  void ExpireIdle() ABSL_LOCKS_EXCLUDED(mutex_);

  // Finds the sequences that the operation's spans name, checks that they fit the request, and
  // fills in operation->sequences, ->order and, with the lengths as they are now,
  // ->sequence_lengths. Does nothing if all K/V is inline. NOT_FOUND, INVALID_ARGUMENT.
  absl::Status Lease(AttendOperation* operation) ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes pages for what `operations` append, in their order, each wholly or not at all, and fills
  // in `*launch` and each operation's sequence_lengths. What cannot be launched is in
  // launch->refused: NOT_FOUND if a sequence was deleted, FAILED_PRECONDITION if expected_length
  // differs, RESOURCE_EXHAUSTED if the arena or a quota is full.
  void Begin(absl::Span<AttendOperation* const> operations, Launch* launch)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The launch has ended. `ok`: what it appended is there. Else every sequence is as it was.
  void End(const Launch& launch, bool ok) ABSL_LOCKS_EXCLUDED(mutex_);

  // Pages of at most `max_bytes` that should change their segment; none while others are on their
  // way. If there are any, the caller copies them on the device and calls EndMoves; nothing waits
  // for that.
  PageMoves BeginMoves(size_t max_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndMoves(const PageMoves& moves, bool ok) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether a quarter of the hot segment is free that pages have left since this was last true.
  bool TakeHotLeft() ABSL_LOCKS_EXCLUDED(mutex_);

  struct Stats {
    size_t sequences = 0;
    size_t pages = 0;
    size_t metadata_bytes = 0;
    struct OfSegment {
      size_t used_bytes = 0;      // of pages
      size_t capacity_bytes = 0;  // of the segment
    };
    OfSegment hot;
    OfSegment cold;
  };
  Stats stats() const ABSL_LOCKS_EXCLUDED(mutex_);

  const Options& options() const { return options_; }
  std::byte* arena_base() const { return memory_.base; }

 private:
  friend class SequenceLease;
  using SequencePtr = std::shared_ptr<Sequence>;
  static constexpr uint32_t kNoOwner = ~uint32_t{0};  // of a page that nobody pays for

  // What undoes a begun append.
  struct BegunAppend {
    SequenceLayer* layer;
    bool created;          // layer->pending
    size_t pending_pages;  // before
    uint64_t length;       // before
  };

  // sequence_store.cc
  absl::StatusOr<SequencePtr> Find(SequenceId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<SequencePtr> Add(const SequenceShape& shape, bool pin, size_t table_pages,
                                  absl::string_view client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(const SequencePtr& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Touch(Sequence* sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SequenceInfo Describe(const Sequence& sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckLease(const AttendRequest& request, size_t span, const Sequence& sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLease(const std::vector<SequencePtr>& sequences) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops the layer's pages from number `keep` on.
  void DropPages(const Sequence& sequence, SequenceLayer* layer, size_t keep)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unref(PageId page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unref, once every launch that runs now has ended.
  void UnrefLater(PageId page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UnrefWhatIsDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // sequence_launch.cc
  absl::Status BeginOperation(AttendOperation* operation, Launch* launch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginSpan(const AttendRequest& request, size_t index, const SpanTensors& tensors,
                         Sequence* sequence, Launch* launch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginAppend(const Sequence& sequence, SequenceLayer* layer, uint32_t rows,
                           Launch* launch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Splits `rows` rows, which go to a layer of `length` rows, by page.
  void AddRowAppends(const SpanTensors& source, uint32_t rows, uint64_t length,
                     const SequenceLayer& layer, Launch* launch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UndoAppends() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<PageId> TakePage(const Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  PageId AllocateOrEvict(const Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EvictOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  PageId PageAt(const SequenceLayer& layer, size_t index) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddRead(const AttendOperation& operation, size_t span, SequenceLayer* layer,
               Sequence* sequence, Launch* launch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndAppend(SequenceLayer* layer, bool deleted, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // sequence_moves.cc
  std::vector<size_t> ChooseHot(const std::vector<const Sequence*>& sequences) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the bytes that will move: none if `to` has no room.
  size_t BeginMove(PageId page, Segment to, PageMoves* moves) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const KvMemory memory_;
  const Clock* const clock_;
  DeviceMetrics* const metrics_;

  mutable Mutex mutex_;
  Arena arena_ ABSL_GUARDED_BY(mutex_);
  ClientAccounts accounts_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, SequencePtr> sequences_ ABSL_GUARDED_BY(mutex_);
  std::list<SequencePtr> by_use_ ABSL_GUARDED_BY(mutex_);  // the one used longest ago first
  size_t metadata_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_serial_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_lease_ ABSL_GUARDED_BY(mutex_) = 0;

  uint64_t last_launch_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> running_ ABSL_GUARDED_BY(mutex_);  // launches
  // Pages to unref when every launch up to the given one has ended.
  std::deque<std::pair<uint64_t, PageId>> unref_later_ ABSL_GUARDED_BY(mutex_);
  std::vector<BegunAppend> begun_ ABSL_GUARDED_BY(mutex_);  // of the operation being begun
  // Between BeginMoves and EndMoves. A page must not move twice at a time: the second copy would be
  // made from a place that the first has given up.
  bool moving_ ABSL_GUARDED_BY(mutex_) = false;
  size_t hot_left_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // since TakeHotLeft was last true
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_SEQUENCE_STORE_H_
