// The client's end of a ring. Internal to the client; proto/wire/ring.h describes the layout and
// the order of the accesses.
#ifndef FLASHCORE_CLIENT_LOCAL_RING_H_
#define FLASHCORE_CLIENT_LOCAL_RING_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "proto/wire/ring.h"

namespace flashcore::client::local {

using SteadyTime = std::chrono::steady_clock::time_point;

// Does not own the memory. One thread at a time submits, one at a time receives; they may be two.
// Wake is safe from any thread.
class Ring {
 public:
  struct Answer {
    uint64_t tag = 0;
    const std::byte* data = nullptr;  // the message, in the ring until Pop
    size_t bytes = 0;                 // of it
    bool malformed = false;           // the server broke the protocol: nothing else is valid
  };

  // `memory` has RingBytes(slots, slot_bytes), zeroed, and is aligned to kRingAlignment.
  Ring(std::byte* memory, uint32_t slots, uint32_t slot_bytes);

  // Most bytes of a request, and of an answer.
  size_t RequestBytes() const { return slot_bytes_ - sizeof(wire::SubmissionSlot); }
  size_t AnswerBytes() const { return slot_bytes_ - sizeof(wire::CompletionSlot); }

  // Whether as many requests as there are slots are unanswered.
  bool Full() const;
  // Room for the next request, RequestBytes() bytes; the ring is not full.
  std::byte* NextSlot();
  // Submits what is in NextSlot. True if the doorbell must be rung.
  [[nodiscard]] bool Submit(uint64_t tag, uint64_t timeout_ns, size_t bytes);

  // The next answer. False if there is none.
  bool Poll(Answer* answer) const;
  void Pop();

  // Waits until there is an answer, `stop` is true (set it before Wake), or `deadline`: spins until
  // `spin_until`, then sleeps.
  void Wait(const std::atomic<bool>& stop, SteadyTime spin_until, SteadyTime deadline);
  void Wake();

 private:
  bool Ready() const { return header_->completed.load(std::memory_order_acquire) != received_; }
  std::byte* Slot(uint64_t number, bool completion) const;

  wire::RingHeader* const header_;
  std::byte* const slots_memory_;
  const uint32_t slots_;
  const uint32_t slot_bytes_;
  // The ring's own counters, which the server cannot change.
  uint64_t submitted_ = 0;  // of the thread that submits
  uint64_t received_ = 0;   // of the thread that receives
  std::atomic<uint64_t> received_shared_{0};
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_RING_H_
