// Keeps the operations on one layer of one sequence in the order of their arrival. Example: four
// operations on two layers, X and Y, in the order of their arrival.
//
//              X        Y
//   op 1     append
//   op 2      read     read
//   op 3      read
//   op 4              append
//
// One batch may take all four, because a batch keeps the order of its operations. If a batch takes
// only op 1, ops 2 and 3 wait until it has ended; op 4 waits as well, because op 2 is older at Y.
// Then ops 2 and 3 may run in two batches at the same time, because both only read X. Op 4 may join
// the batch of op 2, or run when op 2 has ended.
#ifndef FLASHCORE_SERVER_REQUEST_ORDER_H_
#define FLASHCORE_SERVER_REQUEST_ORDER_H_

#include <cstdint>

#include "absl/types/span.h"

namespace flashcore::server {

struct OrderedUse;

// The state of one layer of one sequence, which owns it. The Batcher's mutex guards it.
//
// An operation may leave the queue if it is the oldest waiting one at each of its slots and no
// other batch is in its way: an operation that appends needs a slot where no other batch runs, one
// that only reads needs a slot where no other batch appends.
struct OrderSlot {
  OrderedUse* oldest = nullptr;  // waiting operations, linked by OrderedUse::younger
  OrderedUse* youngest = nullptr;
  int32_t running = 0;           // operations that have left the queue and have not ended
  int32_t running_in_batch = 0;  // operations of `batch` when it was last added to
  uint64_t batch = 0;            // the last batch that took an operation
  bool writer_runs = false;      // a running operation appends; all running ones are in one batch
};

// One operation's use of one slot, at most one per slot. While the operation waits, this is a node
// of the slot's list and must not move.
struct OrderedUse {
  OrderSlot* slot = nullptr;
  bool appends = false;
  OrderedUse* older = nullptr;  // set by the functions below
  OrderedUse* younger = nullptr;
};

// Each function takes all uses of one operation and needs the Batcher's mutex. An operation joins
// all its slots in one step, so the oldest operation in the queue is the oldest at each of its
// slots. Therefore some operation can always run when no other one is running: there is no
// deadlock.

void StartWaiting(absl::Span<OrderedUse> uses);  // behind all that wait
void StopWaiting(absl::Span<OrderedUse> uses);   // it will not run

// Whether a waiting operation may join `batch`.
bool MayRun(absl::Span<const OrderedUse> uses, uint64_t batch);

// From waiting to running. Needs MayRun; `batch` must be the highest batch number so far.
void StartRunning(absl::Span<OrderedUse> uses, uint64_t batch);

// Whether a running operation of `batch` uses one of the slots.
bool IsAtSlotOf(absl::Span<const OrderedUse> uses, uint64_t batch);

// Undoes StartRunning. Call it for all operations of the batch or for none, the last one first.
void UndoStartRunning(absl::Span<OrderedUse> uses);

// From running to waiting, before all that wait: the operation was not launched. Its batch may have
// been joined at its slots by others. For several, call it for the last one first.
void WaitAgain(absl::Span<OrderedUse> uses);

// The operation has ended. True if an operation waits at a slot where nothing runs any more.
bool StopRunning(absl::Span<const OrderedUse> uses);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_ORDER_H_
