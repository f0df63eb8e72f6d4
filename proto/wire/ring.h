// The ring: how requests reach the server, and answers the client, without a system call.
//
// A ring lies in registered memory that the client has zeroed: a RingHeader, then `slots`
// submission slots, then `slots` completion slots, each of `slot_bytes`. All numbers are
// little-endian. Request number n of the ring (from 0) is in submission slot n % slots, answer
// number n in completion slot n % slots. Answers come in any order; `tag` says which request one
// belongs to.
//
// Counters are aligned 8-byte numbers that are stored and loaded whole. On x86-64 plain stores have
// release order and plain loads acquire order; a language without either on another machine uses
// the C library (client/c).
//
// The client submits a request:
//   1. It waits until submitted - answers received < slots. So neither direction can overflow.
//   2. It writes the slot: header, then the serialized v1::AttendRequest.
//   3. It stores submitted + 1 with release order.
//   4. After a full fence (seq_cst) it loads server_sleeps; if that is not 0, it rings the
//      doorbell. It may always ring; a language without fences must.
// The server takes it: loads `submitted` (acquire), copies the slot to memory of its own, and
// stores `taken` (release). It never reads that slot again, so the client may reuse it.
//
// The server answers: it writes the completion slot, stores completed + 1 (release), and after a
// full fence exchanges client_sleeps with 0; if that was not 0 it wakes one thread that waits for
// the futex (FUTEX_WAKE, not private).
// The client receives: loads `completed` (acquire), copies or reads the slot, and stores
// received + 1 (release). It may spin on `completed`, or sleep: store 1 to client_sleeps, full
// fence, load `completed` again, then FUTEX_WAIT (not private) for the value 1.
//
// Counters only grow, and wrap at 2^64. A counter of the client that goes back or runs ahead of
// what step 1 allows, or a slot whose `bytes` exceeds the slot, ends the connection. A slot whose
// message cannot be parsed is answered with INVALID_ARGUMENT. A ring that is closed while requests
// are unanswered still gets their answers, until LocalCloseRing is answered.
//
// Tensors are best left in registered memory, as MemoryRange, at offsets that are multiples of 16;
// small ones may be inline. A request whose answer may not fit in a completion slot is refused with
// INVALID_ARGUMENT: give output_range and lse_range. A request that does not fit in a slot goes
// through the socket, as a LocalCall of "Attend".
#ifndef FLASHCORE_PROTO_WIRE_RING_H_
#define FLASHCORE_PROTO_WIRE_RING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace flashcore::wire {

inline constexpr uint32_t kLocalVersion = 1;  // of local.proto and of this layout
inline constexpr uint32_t kMaxSlots = 4096;
inline constexpr uint32_t kMinSlotBytes = 256;
inline constexpr uint32_t kMaxSlotBytes = 1 << 20;
inline constexpr size_t kRingAlignment = 64;  // also of slot_bytes

// Each counter has a cache line of its own, so that the sides disturb each other only when they
// have news.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> submitted;      // client: requests written
  alignas(64) std::atomic<uint64_t> taken;          // server: requests copied
  alignas(64) std::atomic<uint64_t> completed;      // server: answers written
  alignas(64) std::atomic<uint64_t> received;       // client: answers read
  alignas(64) std::atomic<uint32_t> server_sleeps;  // server: 1 while it needs the doorbell
  alignas(64) std::atomic<uint32_t> client_sleeps;  // client: futex word, 1 while it needs a wake
};
static_assert(sizeof(RingHeader) == 6 * 64 && std::atomic<uint64_t>::is_always_lock_free);

struct SubmissionSlot {
  uint64_t tag;         // the client's; comes back with the answer
  uint64_t timeout_ns;  // from when the server takes it; 0: none
  uint32_t bytes;       // of the message, at most slot_bytes - sizeof(SubmissionSlot)
  uint32_t reserved;    // 0
  // then the serialized v1::AttendRequest
};
static_assert(sizeof(SubmissionSlot) == 24);

struct CompletionSlot {
  uint64_t tag;
  uint32_t bytes;
  uint32_t reserved;  // 0
  // then the serialized v1::AttendResponse; `status` is set if the request failed, without details
  // that would take more than half of the room
};
static_assert(sizeof(CompletionSlot) == 16);

// Bytes of header and slots.
inline constexpr uint64_t RingBytes(uint32_t slots, uint32_t slot_bytes) {
  return sizeof(RingHeader) + uint64_t{2} * slots * slot_bytes;
}

}  // namespace flashcore::wire

#endif  // FLASHCORE_PROTO_WIRE_RING_H_
