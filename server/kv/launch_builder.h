// The resident K/V that a launch takes when it begins, and gives back when it ends.
#ifndef FLASHCORE_SERVER_KV_LAUNCH_BUILDER_H_
#define FLASHCORE_SERVER_KV_LAUNCH_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/kv/launch.h"
#include "server/kv/operation.h"
#include "server/kv/page_pool.h"
#include "server/kv/sequence.h"
#include "server/kv/sequence_table.h"
#include "server/request/request.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

struct SpanTensors;  // spans.h

// Fills in launches and commits or rolls back what they append. An append is a small transaction:
//
//   AddOperation   allocates pages into layer.pending; other readers still see the old length
//   (the launch runs)
//   End, ok        moves the pending pages and the length into the layer
//   End, not ok    frees the pending pages; the layer is as it was
//
// Not thread-safe: the SequenceStore's mutex guards it.
class LaunchBuilder {
 public:
  // All arguments outlive the builder.
  // An operation needs at most `max_flop` floating-point operations (ValidateWork).
  LaunchBuilder(PagePool* pages, SequenceTable* table, double max_flop, const Clock* clock,
                DeviceMetrics* metrics)
      : pages_(*pages), table_(*table), max_flop_(max_flop), clock_(*clock), metrics_(*metrics) {}

  // Adds what a leased operation copies, appends and reads, all of it or nothing, and sets its
  // sequence_lengths to those after its appends. False: `fits` then says no, and nothing was added.
  // NOT_FOUND, FAILED_PRECONDITION, INVALID_ARGUMENT, RESOURCE_EXHAUSTED as in
  // SequenceStore::BeginLaunch.
  absl::StatusOr<bool> AddOperation(AttendOperation* operation, LaunchFit fits, Launch* launch);
  void End(const Launch& launch, bool ok);

 private:
  // The state of a layer before an append of the current operation.
  struct Savepoint {
    SequenceLayer* layer;
    size_t pending_pages;
    uint64_t length;
  };

  absl::Status AddAppends(AttendOperation* operation, Launch* launch);
  absl::Status AddAppend(const AttendOperation& operation, size_t span, const SpanTensors& tensors,
                         Sequence* sequence, Launch* launch);
  absl::Status AllocatePages(const Sequence& sequence, SequenceLayer* layer, uint32_t rows,
                             Launch* launch);
  bool CopiesLastPage(const SequenceLayer& layer) const;
  absl::Status NoPage(SequenceTable::Shortage why);
  absl::Status Full(const AttendOperation& operation) const;
  static absl::Status Deleted(const AttendOperation& operation);
  void AddRead(const AttendOperation& operation, size_t span, TimePoint now, Sequence* sequence,
               Launch* launch);
  // The places of the layer's pages, without pending ones.
  const std::vector<int32_t>& PlacesOf(SequenceLayer* layer) const;
  void RollBack(size_t copies, size_t appends, Launch* launch);
  // `client` is that of the layer's sequence; not used unless `commit`.
  void EndAppend(SequenceLayer* layer, KvClient* client, bool commit);
  std::unique_ptr<PendingAppend> NewPending();
  void Keep(std::unique_ptr<PendingAppend> pending);

  PagePool& pages_;
  SequenceTable& table_;
  const double max_flop_;
  const Clock& clock_;
  DeviceMetrics& metrics_;
  std::vector<Savepoint> savepoints_;                // of the current operation, oldest first
  std::optional<SequenceTable::Shortage> shortage_;  // of the current operation
  std::vector<std::unique_ptr<PendingAppend>> unused_pending_;  // for reuse, with their memory
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_LAUNCH_BUILDER_H_
