// How the host's memory is divided among what the server keeps in it.
#ifndef FLASHCORE_SERVER_MEMORY_BUDGETS_H_
#define FLASHCORE_SERVER_MEMORY_BUDGETS_H_

#include <cstdint>

namespace flashcore::server {

struct HostMemory {
  int64_t bytes = 0;
  bool is_containers = false;  // a limit of a container, whose memory is all for the server

  // The machine's memory, or the limit of this process's control groups if that is less.
  static HostMemory Read();
};

// In bytes, each of one flag.
struct Budgets {
  int64_t message = 0;  // one message; no memory of its own
  int64_t staging = 0;  // of one device
  int64_t transport = 0;
  int64_t unsent_replies = 0;
  int64_t sequence_metadata = 0;  // of one device
  int64_t shared = 0;             // of clients of the local socket
  int64_t kv = 0;                 // of the CPU device
};

// The memory to be divided, and among whom.
struct MemoryUse {
  int devices = 1;
  bool pinned_staging = false;  // taken at start
  bool local_socket = false;
};

// Replaces each budget of `given` that is 0: by a default, or by a share of the memory if that is
// less, so that all of them fit. K/V gets what is left of a container's memory, or a quarter of a
// machine's, at least kMinKvBytes.
Budgets DivideMemory(const HostMemory& memory, const MemoryUse& use, Budgets given);

// The most that the server takes with these budgets, without K/V: code, threads and heap included.
int64_t BytesBesideKv(const HostMemory& memory, const MemoryUse& use, const Budgets& budgets);

inline constexpr int64_t kMinKvBytes = int64_t{4} << 20;

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_BUDGETS_H_
