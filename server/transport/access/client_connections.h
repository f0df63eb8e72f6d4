// Who is at the other end of each connection of gRPC, and limits the connections of one client.
#ifndef FLASHCORE_SERVER_TRANSPORT_ACCESS_CLIENT_CONNECTIONS_H_
#define FLASHCORE_SERVER_TRANSPORT_ACCESS_CLIENT_CONNECTIONS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"

namespace flashcore::server {

// The other end of a connection.
struct Peer {
  std::string address;        // such as "ipv4:127.0.0.1:4711" or "unix:"
  std::optional<uid_t> user;  // of this host; nullopt: the kernel does not say
};

// As grpc::ServerContext::peer() prints it; "unix:" for every Unix socket.
std::string PeerAddress(const SocketAddress& address);

// What grpc::ServerContext::peer() says on a connection that gRPC got as `descriptor`, without TLS.
// No other connection has this name before gRPC has dropped all calls of this one.
std::string DescriptorName(int descriptor);

// A connection counts for every client (the name of an Identity) that has called on it, until it
// ends: behind a proxy there may be several. Connections have the names that
// grpc::ServerContext::peer() has for them. Thread-safe.
class ClientConnections {
 public:
  explicit ClientConnections(int limit) : limit_(limit) {}

  // A connection begins. If there is one of this name, that has ended. Returns its number.
  uint64_t Open(const std::string& name, Peer peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // The connection of this name and number ends, unless it has.
  void Close(const std::string& name, uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

  // Who is at the other end. UNAVAILABLE if the name is a descriptor's and its connection has
  // ended. Of another unknown connection, such as one in this process, the name is the address.
  absl::StatusOr<Peer> Find(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);

  // `client` calls on the connection. RESOURCE_EXHAUSTED if that would be one connection of the
  // client too many. Unknown connections do not count.
  absl::Status Use(const std::string& name, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Connection {
    uint64_t number = 0;
    Peer peer;
    absl::flat_hash_set<std::string> clients;  // that have called
  };

  void Forget(const Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int limit_;
  mutable Mutex mutex_;
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, Connection> open_ ABSL_GUARDED_BY(mutex_);  // by name
  absl::flat_hash_map<std::string, int> connections_ ABSL_GUARDED_BY(mutex_);  // by client
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ACCESS_CLIENT_CONNECTIONS_H_
