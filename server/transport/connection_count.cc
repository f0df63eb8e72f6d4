#include "server/transport/connection_count.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"

namespace flashcore::server {

std::string ConnectionHost(int socket, const SocketAddress& peer) {
  if (peer.family() == AF_UNIX) {
    const std::optional<uid_t> user = UnixPeerUser(socket);
    return user.has_value() ? absl::StrCat("uid:", *user) : "uid:unknown";
  }
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

}  // namespace flashcore::server
