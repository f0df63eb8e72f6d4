#include "server/memory/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <utility>

namespace flashcore::server {
namespace {

// What the handler reads, so: no locks, no allocation. A range is one word (its first page and how
// many pages it has), set after it is mapped and cleared before it is unmapped. Ranges that are
// mapped at a time do not overlap, so one that contains the faulting address is the right one,
// whatever other threads do to others meanwhile.
constexpr int kPageCountBits = 28;  // 1 TiB; leaves 36 bits, which addresses of 48 bits need
std::atomic<uint64_t> ranges[FaultGuard::kMaxGuards];  // 0: free
std::atomic<bool> lost_ranges[FaultGuard::kMaxGuards];
constexpr uint64_t kTaken = uint64_t{1} << kPageCountBits;  // no pages

size_t page_bytes = 4096;
struct sigaction previous;

bool Replace(uint64_t address) {
  const uint64_t page = address / page_bytes;
  for (size_t slot = 0; slot < FaultGuard::kMaxGuards; ++slot) {
    const uint64_t range = ranges[slot].load();
    const uint64_t first = range >> kPageCountBits;
    const uint64_t count = range & ((uint64_t{1} << kPageCountBits) - 1);
    if (page < first || page >= first + count) continue;
    lost_ranges[slot].store(true);
    return mmap(reinterpret_cast<void*>(first * page_bytes), count * page_bytes,
                PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
                0) != MAP_FAILED;
  }
  return false;
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool replaced = Replace(reinterpret_cast<uint64_t>(info->si_addr));
  errno = saved_errno;
  if (replaced) return;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    ::signal(signal, SIG_DFL);  // the instruction faults again, and ends the process
  } else {
    previous.sa_handler(signal);
  }
}

void Install() {
  page_bytes = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGBUS, &action, &previous);
}

}  // namespace

std::optional<FaultGuard> FaultGuard::Make(std::byte* data, size_t bytes) {
  static const bool installed = (Install(), true);
  static_cast<void>(installed);
  const uint64_t first = reinterpret_cast<uint64_t>(data) / page_bytes;
  const uint64_t count = (bytes + page_bytes - 1) / page_bytes;
  if (count >> kPageCountBits != 0 || first >> (64 - kPageCountBits) != 0) return std::nullopt;
  for (size_t slot = 0; slot < kMaxGuards; ++slot) {
    uint64_t free = 0;
    if (!ranges[slot].compare_exchange_strong(free, kTaken)) continue;
    lost_ranges[slot].store(false);
    ranges[slot].store(first << kPageCountBits | count);
    return FaultGuard(slot);
  }
  return std::nullopt;
}

FaultGuard::FaultGuard(FaultGuard&& other) noexcept
    : slot_(std::exchange(other.slot_, kMaxGuards)) {}

FaultGuard::~FaultGuard() {
  if (slot_ < kMaxGuards) ranges[slot_].store(0);
}

bool FaultGuard::lost() const { return lost_ranges[slot_].load(std::memory_order_relaxed); }

}  // namespace flashcore::server
