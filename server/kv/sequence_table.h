// Which sequences a device holds: by id, by client and by last use, within the limits.
#ifndef FLASHCORE_SERVER_KV_SEQUENCE_TABLE_H_
#define FLASHCORE_SERVER_KV_SEQUENCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/kv/page_pool.h"
#include "server/kv/sequence.h"
#include "server/request/identity.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

struct SequenceOptions {
  // The device's number, and how many devices share the ids.
  size_t device = 0;
  size_t devices = 1;
  // When K/V memory or metadata is full: remove the least recently used sequence without a lease of
  // the client that holds the most of it. When a limit of one client is reached: remove that of the
  // client. If false, refuse.
  bool evict_lru = false;
  Nanoseconds idle_timeout{0};  // an unused sequence expires after it; 0: never
  // Pages that one client pays for; 0: no limit. The Engine replaces kHalfOfTheMemory.
  static constexpr size_t kHalfOfTheMemory = std::numeric_limits<size_t>::max();
  size_t client_kv_bytes = 0;
  size_t client_sequences = 0;       // of one client; 0: no limit
  size_t client_metadata_bytes = 0;  // part of metadata_bytes for one client; 0: no limit
  uint32_t max_layers = 1024;        // of one sequence
  uint32_t max_heads = 1024;         // of one request; KV heads of one sequence
  // Floating-point operations of one request, checked again when it is launched.
  double max_request_flop = std::numeric_limits<double>::infinity();
  std::vector<kernels::DType> dtypes;  // that the device has kernels for
  // That the device has kernels for, by how K/V are stored. 8-bit K/V have no others than 16-bit
  // K/V.
  std::map<kernels::KvDType, std::vector<uint32_t>> head_dims;
  // Host memory for sequences and their page tables. Forks are cheap, but not free.
  size_t metadata_bytes = size_t{256} << 20;
  size_t superblock_bytes = Arena::kDefaultSuperblockBytes;  // no page is larger
};

enum class Access {
  kRead,    // get, attend, fork
  kChange,  // append, truncate, delete
};

// Owns the sequences, together with their leases. Not thread-safe: the SequenceStore's mutex guards
// it.
class SequenceTable {
 public:
  using ById = absl::flat_hash_map<SequenceId, SequencePtr>;
  static constexpr char kLost[] =  // of SequenceLost
      "no such sequence: it was deleted or evicted, has expired or never existed; load its K/V "
      "again";

  // All arguments outlive the table.
  SequenceTable(const SequenceOptions* options, PagePool* pages, const Clock* clock,
                DeviceMetrics* metrics)
      : options_(*options),
        pages_(*pages),
        clock_(*clock),
        metrics_(*metrics),
        start_(clock->Now()) {}

  // INVALID_ARGUMENT if the settings contradict each other or the options, PERMISSION_DENIED for a
  // group that the identity does not belong to, NOT_FOUND for a lease that is not open, or not the
  // identity's.
  absl::Status CheckSettings(const SequenceSettings& settings, const Identity& identity) const;

  // A new sequence of `identity`, without rows. `settings` are checked. `table_bytes`: the size of
  // its page tables, charged to the metadata budget. RESOURCE_EXHAUSTED beyond that budget or a
  // limit of the client. Evicts no sequence that has a lease.
  absl::StatusOr<SequencePtr> Add(const SequenceShape& shape, const SequenceSettings& settings,
                                  size_t table_bytes, const Identity& identity);
  // NOT_FOUND if there is none that `identity` may read, whether it exists or not;
  // PERMISSION_DENIED if `identity` may read it, but not change it.
  absl::StatusOr<SequencePtr> Find(SequenceId id, const Identity& identity, Access access) const;
  void Remove(const SequencePtr& sequence);
  // Removes the sequences that have been idle for their idle_timeout and have no lease.
  void RemoveIdle();
  void OpenLease(LeaseId id, const Identity& identity) { leases_[id].client = identity.name; }
  void CloseLease(LeaseId id);
  // Removes a sequence whose lease is closed. False if there is none.
  bool RemoveOrphan();
  void MarkUsed(Sequence* sequence) { MarkUsed(sequence, clock_.Now()); }
  void MarkUsed(Sequence* sequence, TimePoint now);
  // Fetches what Find will read of the sequence `id` into the cache. A request looks up many.
  void Prefetch(SequenceId id) const { by_id_.prefetch(id); }

  // Why there is no page.
  enum class Shortage {
    kClient,  // the client's limit
    kMemory,
  };
  // A page charged to the sequence's client. kNoPage, and why, beyond the client's limit, or if the
  // memory is full and no sequence can be evicted. Takes O(clients) for each evicted sequence.
  PageId AllocatePage(const Sequence& sequence, Shortage* why);
  // RESOURCE_EXHAUSTED: pages of `bytes` in all do not fit beside those that are in use now.
  absl::Status Full(Shortage why, const Sequence& sequence, size_t bytes) const;
  // Lets the layers of `child`, which has none, share the pages of the first `length` rows (unset:
  // of all rows) of those of `parent`. RESOURCE_EXHAUSTED beyond the limit of the child's client.
  absl::Status SharePages(const Sequence& parent, std::optional<uint64_t> length, Sequence* child);
  // Drops the layer's pages from index `keep` on.
  void DropPages(const Sequence& sequence, SequenceLayer* layer, size_t keep);

  const ById& by_id() const { return by_id_; }
  size_t metadata_bytes() const { return metadata_bytes_; }

 private:
  // Whether `client` may have one more sequence, of `metadata_bytes`. Evicts if it may.
  absl::Status MakeRoom(size_t metadata_bytes, const std::string& client);
  // Whether `client` may pay for `bytes` more. Evicts if it may.
  bool MakeKvRoom(size_t bytes, const KvClient& client);
  absl::Status OverKvQuota(size_t needed, size_t used) const;
  // These evict one sequence. False if they may not, or have none without a lease. For a limit of
  // one client, one of that client:
  bool EvictOf(const KvClient& client);
  // Evicts from the client that would hold most of `held` after `client` gets `amount`. A client
  // never loses to one that holds as much or more.
  bool EvictOfLargest(size_t KvClient::*held, const std::string& client, size_t amount);
  bool Evict(const SequencePtr& victim);

  const SequenceOptions& options_;
  PagePool& pages_;
  const Clock& clock_;
  DeviceMetrics& metrics_;
  ById by_id_;
  std::multimap<TimePoint, SequencePtr> expiries_;  // not before this time
  struct ClientLease {
    std::string client;  // name of the identity
    std::list<SequencePtr> sequences;
  };
  absl::flat_hash_map<LeaseId, ClientLease> leases_;  // open ones
  std::list<SequencePtr> orphans_;                    // their leases are closed
  size_t metadata_bytes_ = 0;
  TimePoint start_;
  uint64_t last_serial_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_SEQUENCE_TABLE_H_
