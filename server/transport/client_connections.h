// Limits the connections of one client.
#ifndef FLASHCORE_SERVER_TRANSPORT_CLIENT_CONNECTIONS_H_
#define FLASHCORE_SERVER_TRANSPORT_CLIENT_CONNECTIONS_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"

namespace flashcore::server {

// A TCP connection counts for every client (the name of an Identity) that has called on it, until
// it ends: behind a proxy there may be several. gRPC does not tell the connections of Unix sockets
// apart, so they do not count. Thread-safe.
class ClientConnections {
 public:
  explicit ClientConnections(int limit) : limit_(limit) {}

  // A connection of a TCP socket begins, or ends. Others are ignored.
  void Open(const SocketAddress& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close(const SocketAddress& peer) ABSL_LOCKS_EXCLUDED(mutex_);

  // `client` calls on the connection of `peer`, as gRPC prints it. RESOURCE_EXHAUSTED if that would
  // be one connection of the client too many.
  absl::Status Use(const std::string& peer, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int limit_;
  Mutex mutex_;
  // By peer, as gRPC prints it: who has called.
  absl::flat_hash_map<std::string, absl::flat_hash_set<std::string>> open_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int> connections_ ABSL_GUARDED_BY(mutex_);  // by client
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_CLIENT_CONNECTIONS_H_
