// Memory that a server on the same host reads and writes in place, so that tensors are not sent.
#ifndef FLASHCORE_CLIENT_CPP_SHARED_MEMORY_H_
#define FLASHCORE_CLIENT_CPP_SHARED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "client/cpp/options.h"

namespace flashcore {

namespace client {
class Connection;
}

struct SharedMemoryOptions {
  bool inputs_only =
      false;  // the server maps it read-only; O and LSE are sent even if they are here
  // Permissions of the segment until the server has opened it. The default is for a server of the
  // same user, or root. A server of another user needs 0666, which lets others on the host open the
  // segment in that time. A local target does not need it.
  unsigned mode = 0600;
};

// From Client::CreateSharedMemory. A tensor in it, at a multiple of 16 bytes from its start, is not
// sent with requests of that Client: the request has its place, and the server writes O and LSE to
// theirs. All other tensors are sent, and all tensors once the server has ended the registration
// (it drained, or the connection broke). The results are the same.
//
// The segment is unlinked before it is returned, so nothing remains however the process ends; the
// server then unmaps it, too. Over a local target it is a memfd, which has no name at all, and it
// is registered again with a server that was restarted. Thread-safe.
class SharedMemory {
 public:
  // UNIMPLEMENTED if the server does not allow it or `connection` is over TCP,
  // RESOURCE_EXHAUSTED over a limit of the server or if this host has no memory,
  // PERMISSION_DENIED if the server may not open the segment.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(
      std::shared_ptr<const client::Connection> connection, size_t bytes,
      const SharedMemoryOptions& options, const CallOptions& call);
  // Unregisters and unmaps it. No request that uses it may be in flight.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const;  // page-aligned; zero at first, except maybe for the first 16 bytes
  size_t bytes() const;
  bool registered() const;  // whether the server still has it

 private:
  class Backing;
  class PosixBacking;
  class LocalBacking;
  class Segment;
  class Registration;
  explicit SharedMemory(std::unique_ptr<Backing> backing);

  static absl::StatusOr<std::unique_ptr<Backing>> CreatePosix(
      std::shared_ptr<const client::Connection> connection, size_t bytes,
      const SharedMemoryOptions& options, absl::Time deadline);
  static absl::StatusOr<std::unique_ptr<Backing>> CreateLocal(
      std::shared_ptr<const client::Connection> connection, size_t bytes,
      const SharedMemoryOptions& options, absl::Time deadline);

  const std::unique_ptr<Backing> backing_;
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_SHARED_MEMORY_H_
