#include "server/sharing/door.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace flashcore::server {

std::string ConnectionClient(const SocketAddress& peer, std::optional<uid_t> user) {
  if (user.has_value()) return absl::StrCat("uid:", *user);
  if (peer.family() == AF_UNIX) return "uid:unknown";
  if (IsLoopbackAddress(peer)) return "loopback";
  if (peer.family() == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&peer.storage);
    if (!IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
      SocketAddress network = peer;
      auto* address = reinterpret_cast<sockaddr_in6*>(&network.storage);
      std::memset(&address->sin6_addr.s6_addr[8], 0, 8);
      return absl::StrCat(HostOf(network), "/64");
    }
  }
  return HostOf(peer);
}

const Door::Connection* Door::WhoMakesRoom(const std::vector<Connection>& open,
                                           const Client& client) const {
  const bool own = IsOverShare(client);
  const size_t most = connections_.MustGiveBack()->held;
  const Connection* first = nullptr;
  for (const Connection& connection : open) {
    const bool gives = own ? connection.client == &client : connection.client->held == most;
    // A call is cut off only for a client that has fewer connections.
    if (!gives || (connection.state == State::kBusy && (own || client.held == most))) continue;
    const auto order = [](const Connection& c) { return std::tie(c.state, c.last_use); };
    if (first == nullptr || order(connection) < order(*first)) first = &connection;
  }
  return first;
}

void Door::Ban(const std::string& client, TimePoint now) {
  if (IsBanned(client, now)) return;
  const auto last = bans_.find(client);
  const bool again = last != bans_.end() && now < last->second.end + kLongestBan;
  const Nanoseconds length = again ? std::min(2 * last->second.length, kLongestBan) : kFirstBan;
  if (last == bans_.end() && bans_.size() == kMaxBans) {
    bans_.erase(std::min_element(bans_.begin(), bans_.end(), [](const auto& a, const auto& b) {
      return a.second.end < b.second.end;
    }));
  }
  bans_[client] = {now + length, length};
}

bool Door::IsBanned(const std::string& client, TimePoint now) const {
  const auto ban = bans_.find(client);
  return ban != bans_.end() && now < ban->second.end;
}

}  // namespace flashcore::server
