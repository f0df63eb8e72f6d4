// Memory that a server on the same host reads and writes in place, so that tensors are not sent.
#ifndef FLASHCORE_SHARED_MEMORY_H_
#define FLASHCORE_SHARED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "flashcore/options.h"

namespace flashcore {

namespace client {
class Connection;
namespace local {
class Memory;
}
}  // namespace client

struct SharedMemoryOptions {
  // The server maps it read-only; O and LSE reach it by copies of the client.
  bool inputs_only = false;
};

// From Client::CreateSharedMemory. A tensor in it, at a multiple of 16 bytes from its start, is not
// sent with requests of that Client: the request has its place, and the server writes O and LSE to
// theirs. All other tensors are sent, and all tensors while the server does not have the memory:
// the connection broke. The results are the same.
//
// It is a memfd, which has no name: nothing remains however the process ends, and the server then
// unmaps it, too. It is registered again with a server that was restarted. Thread-safe.
class SharedMemory {
 public:
  // Unregisters and unmaps it. No request that uses it may be in flight.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const;  // page-aligned; zero at first
  size_t bytes() const { return bytes_; }
  bool registered() const;  // whether the server has it

 private:
  friend class Client;
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(
      std::shared_ptr<const client::Connection> connection, size_t bytes,
      const SharedMemoryOptions& options, const CallOptions& call);
  SharedMemory(std::shared_ptr<const client::Connection> connection,
               std::shared_ptr<client::local::Memory> memory, size_t bytes);

  const std::shared_ptr<const client::Connection> connection_;
  const std::shared_ptr<client::local::Memory> memory_;
  const size_t bytes_;  // that were asked for; the memory has whole pages
};

}  // namespace flashcore

#endif  // FLASHCORE_SHARED_MEMORY_H_
