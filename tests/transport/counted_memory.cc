#include "tests/transport/counted_memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

// glibc's own, under the names that stay when a program replaces malloc.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace flashcore::testing {
namespace {

// Constant-initialised: the dynamic linker copies and allocates before any constructor runs.
struct Slot {
  std::atomic<uintptr_t> begin{0};  // 0: not in use
  std::atomic<uintptr_t> end{0};
  std::atomic<size_t> copied_in{0};
  std::atomic<size_t> copied_out{0};
};
Slot slots[CopyWatch::kMaxWatches];
std::atomic<size_t> copied_bytes{0};
std::atomic<int64_t> allocation_count{0};
std::atomic<int64_t> allocation_bytes{0};

void CountOverlap(const Slot& slot, const void* memory, size_t size, std::atomic<size_t>* counter) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t from = std::max(begin, slot.begin.load());
  const uintptr_t to = std::min(begin + size, slot.end.load());
  if (from < to) *counter += to - from;
}

void CountCopy(const void* to, const void* from, size_t size) {
  copied_bytes += size;
  for (Slot& slot : slots) {
    if (slot.begin == 0) continue;
    CountOverlap(slot, to, size, &slot.copied_in);
    CountOverlap(slot, from, size, &slot.copied_out);
  }
}

// Volatile, so that no compiler makes a call of memmove of it.
void* Copy(void* to, const void* from, size_t size) {
  CountCopy(to, from, size);
  auto* target = static_cast<volatile char*>(to);
  const auto* source = static_cast<const char*>(from);
  if (to < from) {
    for (size_t i = 0; i < size; ++i) target[i] = source[i];
  } else {
    for (size_t i = size; i-- > 0;) target[i] = source[i];
  }
  return to;
}

void CountAllocation(size_t bytes) {
  ++allocation_count;
  allocation_bytes += static_cast<int64_t>(bytes);
}

}  // namespace

CopyWatch::CopyWatch(const void* memory, size_t size) {
  while (slots[slot_].begin != 0) {
    if (++slot_ == kMaxWatches) std::abort();
  }
  Slot& slot = slots[slot_];
  slot.copied_in = slot.copied_out = 0;
  slot.end = reinterpret_cast<uintptr_t>(memory) + size;
  slot.begin = reinterpret_cast<uintptr_t>(memory);
}

CopyWatch::~CopyWatch() { slots[slot_].begin = 0; }

size_t CopyWatch::copied_in() const { return slots[slot_].copied_in; }
size_t CopyWatch::copied_out() const { return slots[slot_].copied_out; }

size_t CopiedBytes() { return copied_bytes; }

Allocations AllocationsSoFar() { return {allocation_count, allocation_bytes}; }

}  // namespace flashcore::testing

extern "C" {

using flashcore::testing::Copy;
using flashcore::testing::CountAllocation;

void* memcpy(void* __restrict to, const void* __restrict from, size_t size) noexcept {
  return Copy(to, from, size);
}
void* memmove(void* to, const void* from, size_t size) noexcept { return Copy(to, from, size); }
// The functions that _FORTIFY_SOURCE, with which Debian builds its libraries, makes of the two.
void* __memcpy_chk(void* to, const void* from, size_t size, size_t) noexcept {
  return Copy(to, from, size);
}
void* __memmove_chk(void* to, const void* from, size_t size, size_t) noexcept {
  return Copy(to, from, size);
}

void* malloc(size_t bytes) noexcept {
  CountAllocation(bytes);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) noexcept {
  CountAllocation(count * bytes);
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) noexcept {
  CountAllocation(bytes);
  return __libc_realloc(memory, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  CountAllocation(bytes);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) noexcept {
  CountAllocation(bytes);
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}

}  // extern "C"
