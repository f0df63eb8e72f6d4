// A request on its way through the server, and the resident K/V that it holds on to.
#ifndef FLASHCORE_SERVER_KV_OPERATION_H_
#define FLASHCORE_SERVER_KV_OPERATION_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/memory/staging_pool.h"
#include "server/request/identity.h"
#include "server/request/order.h"
#include "server/request/request.h"
#include "server/request/tensors.h"

namespace flashcore::server {

struct CutLaunch;     // cut_launch.h
struct Sequence;      // sequence.h
class SequenceStore;  // sequence_store.h

// Where the time of one request went. Phases do not overlap.
struct PhaseTimes {
  Nanoseconds receive{0};       // parsing, validation, copying to staging memory
  Nanoseconds staging_wait{0};  // waiting for staging memory
  Nanoseconds queue{0};         // waiting for a lane
  Nanoseconds copy_in{0};       // planning, copying to the device
  Nanoseconds kernel{0};        // attention
  Nanoseconds copy_out{0};      // copying from the device
};

// An operation's hold on the sequences that it names; sequence_store.cc implements it. Protects
// them from idle expiry and eviction, and keeps their records alive, until it is reset or
// destroyed. A held sequence can still be deleted by its client. Not thread-safe. Must not
// outlive the store.
class SequenceHold {
 public:
  SequenceHold() = default;
  SequenceHold(SequenceHold&& other) noexcept { *this = std::move(other); }
  SequenceHold& operator=(SequenceHold&& other) noexcept;
  ~SequenceHold() { Reset(); }

  void Reset();
  bool empty() const { return sequences_.empty(); }
  // [spans] of the operation, null for a span with inline K/V; empty if all K/V is inline.
  const std::vector<std::shared_ptr<Sequence>>& sequences() const { return sequences_; }

 private:
  friend class SequenceStore;
  SequenceStore* store_ = nullptr;
  std::vector<std::shared_ptr<Sequence>> sequences_;
};

// A request in the engine. Its submitter owns it, and keeps it until `done` is called, which may
// destroy it.
struct AttendOperation {
  // Set by the submitter before Admit.
  AttendRequest request;
  Identity identity;
  TimePoint deadline = kNoDeadline;
  int rpc = 0;  // that it counts to in the metrics of devices (DeviceMetrics::PhaseSeconds)
  // Called exactly once if Engine::Enqueue returned OK, else never. Runs on a thread of the engine
  // or of Engine::EndAll's caller, which it must not block. With OK, output and LSE are written.
  absl::AnyInvocable<void(absl::Status)> done;

  // The client is gone. A wait for staging memory ends, and a queued operation is never launched:
  // both with CANCELLED. From any thread.
  void Cancel() {
    cancelled = true;
    staging_wait.Cancel();
  }
  std::atomic<bool> cancelled{false};
  // Set by the device: its stream raises request.results_ready when the results are written.
  bool raised_by_device = false;

  // Results.
  PhaseTimes times;  // `receive` is the transport's, the others are the engine's
  // Rows in the sequence of each span after its append, [spans], 0 for inline K/V; empty if all K/V
  // is inline. Set with OK.
  std::vector<uint64_t> sequence_lengths;

  // Set by Admit.
  size_t device = 0;       // index in the fleet
  SequenceHold sequences;  // protects the sequences that the spans name from eviction
  AttendTensors tensors;   // the submitter fills the inputs before Enqueue
  StagingWait staging_wait;

  // Set by the queue.
  std::vector<OrderedUse> order;  // among the operations on the same layers of the same sequences
  TimePoint submitted;
  int64_t tokens = 0;   // query rows, or rows to append if there are more
  Nanoseconds work{0};  // estimated time on the device; if `cut`, what is left of it

  // Set by the engine: its launch has begun, is executed in parts, and has not ended.
  std::shared_ptr<CutLaunch> cut;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_OPERATION_H_
