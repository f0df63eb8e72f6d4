// Which sequences a device holds: by id, by client and by last use, within the limits.
#ifndef FLASHCORE_SERVER_KV_SEQUENCE_TABLE_H_
#define FLASHCORE_SERVER_KV_SEQUENCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/kv/page_pool.h"
#include "server/kv/sequence.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

struct SequenceOptions {
  uint8_t device = 0;  // device number, part of every sequence id
  // When K/V memory is full: remove the least recently used sequence without a lease. If false,
  // refuse the append.
  bool evict_lru = false;
  Nanoseconds idle_timeout{0};  // an unused sequence expires after it; 0: never
  size_t client_kv_bytes = 0;   // pages that one client pays for; 0: no limit
  size_t client_sequences = 0;  // of one client; 0: no limit
  uint32_t max_layers = 1024;   // of one sequence
  uint32_t max_heads = 1024;    // KV heads of one sequence
  // Floating-point operations of one request, checked again when it is launched.
  double max_request_flop = std::numeric_limits<double>::infinity();
  std::vector<kernels::DType> dtypes;  // that the device has kernels for
  std::vector<uint32_t> head_dims;     // that the device has kernels for
  // Host memory for sequences and their page tables. Forks are cheap, but not free.
  size_t metadata_bytes = size_t{256} << 20;
  size_t superblock_bytes = Arena::kDefaultSuperblockBytes;  // no page is larger
};

// Owns the sequences, together with their leases. Not thread-safe: the SequenceStore's mutex guards
// it.
class SequenceTable {
 public:
  // All arguments outlive the table.
  SequenceTable(const SequenceOptions* options, PagePool* pages, const Clock* clock,
                DeviceMetrics* metrics)
      : options_(*options), pages_(*pages), clock_(*clock), metrics_(*metrics) {}

  // A new sequence without rows. `table_pages`: the size of its page tables, charged to the
  // metadata budget. RESOURCE_EXHAUSTED beyond that budget or the client's quota.
  absl::StatusOr<SequencePtr> Add(const SequenceShape& shape, bool pin, size_t table_pages,
                                  absl::string_view client);
  absl::StatusOr<SequencePtr> Find(SequenceId id) const;  // NOT_FOUND if there is none
  void Remove(const SequencePtr& sequence);
  // Removes the sequences that have been idle for idle_timeout and have no lease.
  void RemoveIdle();
  void MarkUsed(Sequence* sequence);

  // A page charged to the sequence's client. RESOURCE_EXHAUSTED beyond the client's quota, or if
  // the memory is full and no sequence can be evicted.
  absl::StatusOr<PageId> AllocatePage(const Sequence& sequence);
  // Drops the layer's pages from index `keep` on.
  void DropPages(const Sequence& sequence, SequenceLayer* layer, size_t keep);

  const std::list<SequencePtr>& by_use() const { return by_use_; }  // least recently used first
  size_t metadata_bytes() const { return metadata_bytes_; }

 private:
  bool EvictOne();

  const SequenceOptions& options_;
  PagePool& pages_;
  const Clock& clock_;
  DeviceMetrics& metrics_;
  absl::flat_hash_map<SequenceId, SequencePtr> by_id_;
  std::list<SequencePtr> by_use_;
  size_t metadata_bytes_ = 0;
  uint64_t last_serial_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_SEQUENCE_TABLE_H_
