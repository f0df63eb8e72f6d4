#include "server/transport/client_connections.h"

#include <netinet/in.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

// As grpc::ServerContext::peer() does; empty for a Unix socket.
std::string PeerName(const SocketAddress& address) {
  if (address.family() != AF_INET && address.family() != AF_INET6) return "";
  const std::string host = HostOf(address);
  const int port = PortOf(address);
  return absl::StrContains(host, ':') ? absl::StrCat("ipv6:%5B", host, "%5D:", port)
                                      : absl::StrCat("ipv4:", host, ":", port);
}

}  // namespace

void ClientConnections::Open(const SocketAddress& peer) {
  std::string name = PeerName(peer);
  if (name.empty()) return;
  MutexLock lock(&mutex_);
  open_.try_emplace(std::move(name));
}

void ClientConnections::Close(const SocketAddress& peer) {
  MutexLock lock(&mutex_);
  const auto connection = open_.find(PeerName(peer));
  if (connection == open_.end()) return;
  for (const std::string& client : connection->second) {
    const auto count = connections_.find(client);
    if (--count->second == 0) connections_.erase(count);
  }
  open_.erase(connection);
}

absl::Status ClientConnections::Use(const std::string& peer, const std::string& client) {
  MutexLock lock(&mutex_);
  const auto connection = open_.find(peer);
  if (connection == open_.end() || connection->second.contains(client)) return absl::OkStatus();
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
  connection->second.insert(client);
  ++count;
  return absl::OkStatus();
}

}  // namespace flashcore::server
