#include "client/local/ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

namespace flashcore::client::local {
namespace {

using wire::CompletionSlot;
using wire::RingHeader;
using wire::SubmissionSlot;

constexpr int kPausesPerLookAtClock = 32;
constexpr std::chrono::nanoseconds kLongestSleep = std::chrono::seconds(60);

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void FutexWait(std::atomic<uint32_t>* word, uint32_t value, std::chrono::nanoseconds time) {
  const timespec timeout = {static_cast<time_t>(time.count() / 1'000'000'000),
                            static_cast<long>(time.count() % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

}  // namespace

Ring::Ring(std::byte* memory, uint32_t slots, uint32_t slot_bytes)
    : header_(reinterpret_cast<RingHeader*>(memory)),
      slots_memory_(memory + sizeof(RingHeader)),
      slots_(slots),
      slot_bytes_(slot_bytes) {}

std::byte* Ring::Slot(uint64_t number, bool completion) const {
  const uint64_t index = (number & (slots_ - 1)) + (completion ? slots_ : 0);
  return slots_memory_ + index * slot_bytes_;
}

bool Ring::Full() const {
  return submitted_ - received_shared_.load(std::memory_order_acquire) >= slots_;
}

std::byte* Ring::NextSlot() { return Slot(submitted_, false) + sizeof(SubmissionSlot); }

bool Ring::Submit(uint64_t tag, uint64_t timeout_ns, size_t bytes) {
  const SubmissionSlot slot = {tag, timeout_ns, static_cast<uint32_t>(bytes), 0};
  std::memcpy(Slot(submitted_, false), &slot, sizeof(slot));
  header_->submitted.store(++submitted_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return header_->server_sleeps.load(std::memory_order_relaxed) != 0;
}

bool Ring::Poll(Answer* answer) const {
  const uint64_t completed = header_->completed.load(std::memory_order_acquire);
  if (completed == received_) return false;
  CompletionSlot slot;
  const std::byte* const at = Slot(received_, true);
  std::memcpy(&slot, at, sizeof(slot));
  answer->tag = slot.tag;
  answer->malformed = completed - received_ > slots_ || slot.bytes > AnswerBytes();
  answer->data = at + sizeof(slot);
  answer->bytes = answer->malformed ? 0 : slot.bytes;
  return true;
}

void Ring::Pop() {
  ++received_;
  header_->received.store(received_, std::memory_order_release);
  received_shared_.store(received_, std::memory_order_release);
}

void Ring::Wait(const std::atomic<bool>& stop, SteadyTime spin_until, SteadyTime deadline) {
  SteadyTime now;
  do {
    for (int i = 0; i < kPausesPerLookAtClock; ++i) {
      if (Ready() || stop.load(std::memory_order_acquire)) return;
      Pause();
    }
    now = SteadyTime::clock::now();
  } while (now < spin_until && now < deadline);
  while (now < deadline) {
    header_->client_sleeps.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (Ready() || stop.load(std::memory_order_acquire)) break;
    FutexWait(&header_->client_sleeps, 1,
              std::min<std::chrono::nanoseconds>(deadline - now, kLongestSleep));
    now = SteadyTime::clock::now();
  }
  header_->client_sleeps.store(0, std::memory_order_relaxed);
}

void Ring::Wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header_->client_sleeps.exchange(0, std::memory_order_relaxed) == 0) return;
  syscall(SYS_futex, &header_->client_sleeps, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace flashcore::client::local
