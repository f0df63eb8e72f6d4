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
  // segment in that time.
  unsigned mode = 0600;
};

// From Client::CreateSharedMemory. A tensor in it, at a multiple of 16 bytes from its start, is not
// sent with requests of that Client: the request has its place, and the server writes O and LSE to
// theirs. All other tensors are sent, and all tensors once the server has ended the registration
// (it drained, or the connection broke). The results are the same.
//
// The segment is unlinked before it is returned, so nothing remains however the process ends; the
// server then unmaps it, too. Thread-safe.
class SharedMemory {
 public:
  // UNIMPLEMENTED if the server does not allow it or `connection` is not to a Unix socket,
  // RESOURCE_EXHAUSTED over a limit of the server or if this host has no memory,
  // PERMISSION_DENIED if the server may not open the segment.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(
      std::shared_ptr<const client::Connection> connection, size_t bytes,
      const SharedMemoryOptions& options, const CallOptions& call);
  // Unregisters and unmaps it. No request that uses it may be in flight.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const;  // page-aligned; zero except for the first 16 bytes
  size_t bytes() const;
  bool registered() const;  // whether the server still has it

 private:
  class Segment;
  class Registration;
  SharedMemory(std::unique_ptr<Segment> segment, std::shared_ptr<Registration> registration);

  const std::unique_ptr<Segment> segment_;
  const std::shared_ptr<Registration> registration_;
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_SHARED_MEMORY_H_
