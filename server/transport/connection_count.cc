#include "server/transport/connection_count.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace flashcore::server {

std::string ConnectionHost(int socket, const SocketAddress& peer) {
  if (peer.family() == AF_UNIX) {
    ucred user = {};
    socklen_t size = sizeof(user);
    const bool known = getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &size) == 0;
    return known ? absl::StrCat("uid:", user.uid) : "uid:unknown";
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
