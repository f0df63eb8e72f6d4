#include "server/transport/access/client_connections.h"

#include <sys/socket.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

constexpr char kDescriptorPrefix[] = "fd:";

}  // namespace

std::string PeerAddress(const SocketAddress& address) {
  if (address.family() != AF_INET && address.family() != AF_INET6) return "unix:";
  const std::string host = HostOf(address);
  const int port = PortOf(address);
  return absl::StrContains(host, ':') ? absl::StrCat("ipv6:%5B", host, "%5D:", port)
                                      : absl::StrCat("ipv4:", host, ":", port);
}

std::string DescriptorName(int descriptor) { return absl::StrCat(kDescriptorPrefix, descriptor); }

uint64_t ClientConnections::Open(const std::string& name, Peer peer) {
  MutexLock lock(&mutex_);
  Connection& connection = open_[name];
  Forget(connection);
  connection = {++last_number_, std::move(peer), {}};
  return connection.number;
}

void ClientConnections::Close(const std::string& name, uint64_t number) {
  MutexLock lock(&mutex_);
  const auto connection = open_.find(name);
  if (connection == open_.end() || connection->second.number != number) return;
  Forget(connection->second);
  open_.erase(connection);
}

void ClientConnections::Forget(const Connection& connection) {
  for (const std::string& client : connection.clients) {
    const auto count = connections_.find(client);
    if (--count->second == 0) connections_.erase(count);
  }
}

absl::StatusOr<Peer> ClientConnections::Find(const std::string& name) const {
  MutexLock lock(&mutex_);
  const auto connection = open_.find(name);
  if (connection != open_.end()) return connection->second.peer;
  if (absl::StartsWith(name, kDescriptorPrefix)) {
    return absl::UnavailableError("the connection has ended");
  }
  return Peer{name, std::nullopt};
}

absl::Status ClientConnections::Use(const std::string& name, const std::string& client) {
  MutexLock lock(&mutex_);
  const auto connection = open_.find(name);
  if (connection == open_.end() || connection->second.clients.contains(client)) {
    return absl::OkStatus();
  }
  int& count = connections_[client];
  if (count >= limit_) {
    return WithInfo(absl::ResourceExhaustedError(
                        absl::StrCat("connections: this client uses ", count,
                                     " already, as many as --max_connections_per_client allows")),
                    reason::kQuotaExceeded,
                    {{"limit", "max_connections_per_client"},
                     {"needed", 1},
                     {"used", count},
                     {"allowed", limit_}});
  }
  connection->second.clients.insert(client);
  ++count;
  return absl::OkStatus();
}

}  // namespace flashcore::server
