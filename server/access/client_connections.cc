#include "server/access/client_connections.h"

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

std::shared_ptr<ClientConnection> ClientConnections::Open(const std::string& name, Peer peer) {
  auto connection = std::make_shared<ClientConnection>(name, std::move(peer));
  MutexLock lock(&mutex_);
  Entry& entry = open_[name];
  Forget(entry);
  entry = {connection, {}};
  return connection;
}

void ClientConnections::Close(const ClientConnection& connection) {
  MutexLock lock(&mutex_);
  const Entry* entry = EntryOf(connection);
  if (entry == nullptr) return;
  Forget(*entry);
  open_.erase(connection.name());
}

ClientConnections::Entry* ClientConnections::EntryOf(const ClientConnection& connection) {
  const auto found = open_.find(connection.name());
  const bool is_open = found != open_.end() && found->second.connection.get() == &connection;
  return is_open ? &found->second : nullptr;
}

void ClientConnections::Forget(const Entry& entry) {
  for (const std::string& client : entry.clients) {
    const auto count = connections_.find(client);
    if (--count->second == 0) connections_.erase(count);
  }
}

std::shared_ptr<ClientConnection> ClientConnections::Find(const std::string& name) const {
  {
    MutexLock lock(&mutex_);
    const auto found = open_.find(name);
    if (found != open_.end()) return found->second.connection;
  }
  if (absl::StartsWith(name, kDescriptorPrefix)) return nullptr;
  return std::make_shared<ClientConnection>(name, Peer{name, std::nullopt});
}

absl::Status ClientConnections::Use(const ClientConnection& connection, const std::string& client) {
  MutexLock lock(&mutex_);
  Entry* entry = EntryOf(connection);
  if (entry == nullptr || entry->clients.contains(client)) return absl::OkStatus();
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
  entry->clients.insert(client);
  ++count;
  return absl::OkStatus();
}

}  // namespace flashcore::server
