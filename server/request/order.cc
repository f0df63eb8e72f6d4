#include "server/request/order.h"

#include <algorithm>

namespace flashcore::server {
namespace {

// Inserts `use` between its neighbours; null is the end of the list.
void Link(OrderedUse* use, OrderedUse* older, OrderedUse* younger) {
  use->older = older;
  use->younger = younger;
  (older != nullptr ? older->younger : use->slot->oldest) = use;
  (younger != nullptr ? younger->older : use->slot->youngest) = use;
}

void Unlink(OrderedUse* use) {
  (use->older != nullptr ? use->older->younger : use->slot->oldest) = use->younger;
  (use->younger != nullptr ? use->younger->older : use->slot->youngest) = use->older;
  use->older = use->younger = nullptr;
}

bool MayRunAt(const OrderedUse& use, uint64_t batch) {
  const OrderSlot& slot = *use.slot;
  if (slot.oldest != &use) return false;
  const bool in_batch = slot.batch == batch;
  if (!use.appends) return !slot.writer_runs || in_batch;
  return slot.running == (in_batch ? slot.running_in_batch : 0);
}

}  // namespace

void StartWaiting(absl::Span<OrderedUse> uses) {
  for (OrderedUse& use : uses) Link(&use, use.slot->youngest, nullptr);
}

void StopWaiting(absl::Span<OrderedUse> uses) {
  for (OrderedUse& use : uses) Unlink(&use);
}

bool MayRun(absl::Span<const OrderedUse> uses, uint64_t batch) {
  return std::all_of(uses.begin(), uses.end(),
                     [batch](const OrderedUse& use) { return MayRunAt(use, batch); });
}

void StartRunning(absl::Span<OrderedUse> uses, uint64_t batch) {
  for (OrderedUse& use : uses) {
    Unlink(&use);
    OrderSlot& slot = *use.slot;
    if (slot.batch != batch) {
      slot.batch = batch;
      slot.running_in_batch = 0;
    }
    ++slot.running;
    ++slot.running_in_batch;
    slot.writer_runs |= use.appends;
  }
}

bool IsAtSlotOf(absl::Span<const OrderedUse> uses, uint64_t batch) {
  return std::any_of(uses.begin(), uses.end(), [batch](const OrderedUse& use) {
    return use.slot->running > 0 && use.slot->batch == batch;
  });
}

void UndoStartRunning(absl::Span<OrderedUse> uses) {
  for (OrderedUse& use : uses) {
    OrderSlot& slot = *use.slot;
    --slot.running;
    --slot.running_in_batch;
    // No other batch has a writer here: StartRunning would not have been allowed.
    slot.writer_runs = false;
    Link(&use, nullptr, slot.oldest);
  }
}

void WaitAgain(absl::Span<OrderedUse> uses) {
  for (OrderedUse& use : uses) {
    OrderSlot& slot = *use.slot;
    // While others of its batch run, it is not known whether they append.
    if (--slot.running == 0) slot.writer_runs = false;
    Link(&use, nullptr, slot.oldest);
  }
}

bool StopRunning(absl::Span<const OrderedUse> uses) {
  bool freed = false;
  for (const OrderedUse& use : uses) {
    OrderSlot& slot = *use.slot;
    if (--slot.running > 0) continue;
    slot.writer_runs = false;
    freed |= slot.oldest != nullptr;
  }
  return freed;
}

}  // namespace flashcore::server
