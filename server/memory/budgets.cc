#include "server/memory/budgets.h"

#include <unistd.h>

#include <algorithm>

#include "server/base/cgroup.h"

namespace flashcore::server {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Memory in no budget: pages of the program and its libraries, threads, connections, and what the
// kernel charges to a container, such as page tables and socket buffers; and a part that grows with
// the budgets, for what a heap loses between its pieces. tests/e2e/container_test.py fills all.
int64_t Overhead(const HostMemory& memory) { return 64 * kMiB + memory.bytes / 16; }

}  // namespace

HostMemory HostMemory::Read() {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  const int64_t limit = ReadCgroupLimits().memory_bytes.value_or(machine);
  return {std::min(limit, machine), limit < machine};
}

int64_t BytesBesideKv(const HostMemory& memory, const MemoryUse& use, const Budgets& budgets) {
  int64_t bytes = Overhead(memory) + budgets.transport + budgets.unsent_replies +
                  use.devices * (budgets.staging + budgets.sequence_metadata);
  // Half frames and unanswered calls have as much again each.
  if (use.local_socket) bytes += 2 * budgets.transport + budgets.shared;
  return bytes;
}

Budgets DivideMemory(const HostMemory& memory, const MemoryUse& use, Budgets given) {
  const auto set = [](int64_t* budget, int64_t value) {
    if (*budget == 0) *budget = value;
  };
  const int64_t bytes = memory.bytes;
  set(&given.message, std::clamp(bytes / 16, kMiB, 64 * kMiB));
  set(&given.staging, std::max(std::min(1024 * kMiB, bytes / 8 / use.devices), 2 * given.message));
  set(&given.transport, std::max(std::min(256 * kMiB, bytes / 8), 2 * given.message));
  set(&given.unsent_replies, std::clamp(bytes / 32, kMiB, 64 * kMiB));
  set(&given.sequence_metadata, std::clamp(bytes / 32 / use.devices, kMiB, 256 * kMiB));
  set(&given.shared, std::clamp(bytes / 8, kMiB, 1024 * kMiB));
  const int64_t left = bytes - BytesBesideKv(memory, use, given);
  set(&given.kv, std::max(memory.is_containers ? left : std::min(left, bytes / 4), kMinKvBytes));
  return given;
}

}  // namespace flashcore::server
