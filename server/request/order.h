// What keeps the operations on one layer of one sequence in the order of their arrival.
#ifndef FLASHCORE_SERVER_REQUEST_ORDER_H_
#define FLASHCORE_SERVER_REQUEST_ORDER_H_

#include <cstdint>

#include "absl/types/span.h"

namespace flashcore::server {

struct OrderedUse;

// One for each layer of each sequence; the layer owns it, the Batcher guards and uses it.
//
// An operation may leave the queue when it is the oldest that waits at each of its slots, and when
// nothing that runs in another batch is in its way: an operation that appends runs alone on its
// slot, operations that only read run together. Within one batch the order of the operations is
// order enough.
struct OrderSlot {
  OrderedUse* oldest = nullptr;    // of the queued operations, linked by OrderedUse::younger
  OrderedUse* youngest = nullptr;  // likewise
  int32_t running = 0;             // operations that have left the queue and not ended
  int32_t running_in_batch = 0;    // of these, how many `batch` had when it was last added to
  uint64_t batch = 0;              // the last batch that took one
  bool writer_runs = false;        // one of those running appends; then all run in one batch
};

// That an operation uses a slot; an operation uses a slot at most once. It is a link of the slot's
// list, so it stays where it is while its operation is queued.
struct OrderedUse {
  OrderSlot* slot = nullptr;
  bool appends = false;
  // Of the functions below.
  OrderedUse* older = nullptr;
  OrderedUse* younger = nullptr;
};

// Each takes all uses of one operation; they need a mutex around them, which is the Batcher's. An
// operation takes its places at all of its slots in one step. So the oldest in the queue is the
// oldest at each of its slots: some operation can always run once nothing else does, in whatever
// order the operations name their slots.

void StartWaiting(absl::Span<OrderedUse> uses);  // behind all that wait
void StopWaiting(absl::Span<OrderedUse> uses);   // will not run

// Whether an operation that waits may join `batch`.
bool MayRun(absl::Span<const OrderedUse> uses, uint64_t batch);

// From waiting to running. Only if MayRun, and while `batch` is the last batch anywhere.
void StartRunning(absl::Span<OrderedUse> uses, uint64_t batch);

// Takes StartRunning back. For all operations of that batch or none, the last one first.
void UndoStartRunning(absl::Span<OrderedUse> uses);

// Has ended. True if an operation waits at a slot where nothing runs any more.
bool StopRunning(absl::Span<const OrderedUse> uses);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_ORDER_H_
