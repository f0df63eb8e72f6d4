// The connections of gRPC: who is at the other end of each, its calls, and a limit for one client.
#ifndef FLASHCORE_SERVER_ACCESS_CLIENT_CONNECTIONS_H_
#define FLASHCORE_SERVER_ACCESS_CLIENT_CONNECTIONS_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "server/base/clock.h"
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

// The value of grpc::ServerContext::peer() on a connection that gRPC got as `descriptor`, without
// TLS. No other connection has this name before gRPC has dropped all calls of this one.
std::string DescriptorName(int descriptor);

// A connection and its calls: all those of our own services. gRPC answers unknown methods, and
// those of its health service, by itself. Thread-safe.
class ClientConnection {
 public:
  ClientConnection(std::string name, Peer peer) : name_(std::move(name)), peer_(std::move(peer)) {}
  ClientConnection(const ClientConnection&) = delete;
  ClientConnection& operator=(const ClientConnection&) = delete;

  const std::string& name() const { return name_; }
  const Peer& peer() const { return peer_; }

  void CallBegan() { started_.fetch_add(1); }
  void CallEnded(TimePoint now) {
    last_end_.store(now);
    finished_.fetch_add(1);
  }
  // Calls since the connection began. Read `finished` first: it is never ahead of `started` then.
  uint64_t started() const { return started_.load(); }
  uint64_t finished() const { return finished_.load(); }
  TimePoint last_end() const { return last_end_.load(); }  // of a call; TimePoint::min(): none yet

  // Whoever accepted the connection ends it, soon.
  void Break() { broken_.store(true); }
  bool broken() const { return broken_.load(); }

 private:
  const std::string name_;
  const Peer peer_;
  std::atomic<uint64_t> started_{0};
  std::atomic<uint64_t> finished_{0};
  std::atomic<TimePoint> last_end_{TimePoint::min()};
  std::atomic<bool> broken_{false};
};

// Counts an open call on its connection. Null: on none, such as a call of the local socket.
class ConnectionCall {
 public:
  ConnectionCall(std::shared_ptr<ClientConnection> connection, const Clock* clock)
      : connection_(std::move(connection)), clock_(clock) {
    if (connection_ != nullptr) connection_->CallBegan();
  }
  ~ConnectionCall() {
    if (connection_ != nullptr) connection_->CallEnded(clock_->Now());
  }
  ConnectionCall(const ConnectionCall&) = delete;
  ConnectionCall& operator=(const ConnectionCall&) = delete;

  ClientConnection* connection() const { return connection_.get(); }

 private:
  const std::shared_ptr<ClientConnection> connection_;
  const Clock* const clock_;
};

// A connection counts for every client (the name of an Identity) that has called on it, until it
// ends: behind a proxy there may be several. Connections have the names that
// grpc::ServerContext::peer() has for them. Thread-safe.
class ClientConnections {
 public:
  explicit ClientConnections(int limit) : limit_(limit) {}

  // A connection begins. If there is one of this name, that has ended.
  std::shared_ptr<ClientConnection> Open(const std::string& name, Peer peer)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The connection ends, unless it has.
  void Close(const ClientConnection& connection) ABSL_LOCKS_EXCLUDED(mutex_);

  // Null if the name is a descriptor's and its connection has ended. For any other unknown
  // connection, such as one in this process, the name is the address.
  std::shared_ptr<ClientConnection> Find(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_);

  // `client` calls on the connection. RESOURCE_EXHAUSTED if that would be one connection of the
  // client too many. Connections that are not open do not count.
  absl::Status Use(const ClientConnection& connection, const std::string& client)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<ClientConnection> connection;
    absl::flat_hash_set<std::string> clients;  // that have called
  };

  // The entry of an open connection, else null.
  Entry* EntryOf(const ClientConnection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int limit_;
  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Entry> open_ ABSL_GUARDED_BY(mutex_);       // by name
  absl::flat_hash_map<std::string, int> connections_ ABSL_GUARDED_BY(mutex_);  // by client
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_CLIENT_CONNECTIONS_H_
