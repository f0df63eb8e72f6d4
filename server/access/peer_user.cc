#include "server/access/peer_user.h"

#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>

namespace flashcore::server {
namespace {

// An IPv6 address, or an IPv4 address mapped to IPv6; in network byte order.
using Address = std::array<uint8_t, 16>;

Address FromV4(const void* bytes) {
  Address address = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  std::memcpy(&address[12], bytes, 4);
  return address;
}

Address FromV6(const void* bytes) {
  Address address;
  std::memcpy(address.data(), bytes, address.size());
  return address;
}

Address AddressOf(const SocketAddress& socket) {
  return socket.family() == AF_INET
             ? FromV4(&reinterpret_cast<const sockaddr_in*>(&socket.storage)->sin_addr)
             : FromV6(&reinterpret_cast<const sockaddr_in6*>(&socket.storage)->sin6_addr);
}

bool IsV4(const Address& address) {
  return IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(address.data()));
}

// For the client's socket, whose destination is ours.
inet_diag_req_v2 Query(const SocketAddress& client, const SocketAddress& server) {
  const Address source = AddressOf(client), destination = AddressOf(server);
  const bool v4 = IsV4(source);
  inet_diag_req_v2 query = {};
  query.sdiag_family = v4 ? AF_INET : AF_INET6;
  query.sdiag_protocol = IPPROTO_TCP;
  query.idiag_states = 1 << TCP_ESTABLISHED;
  query.id.idiag_sport = htons(static_cast<uint16_t>(PortOf(client)));
  query.id.idiag_dport = htons(static_cast<uint16_t>(PortOf(server)));
  std::memcpy(query.id.idiag_src, &source[v4 ? 12 : 0], v4 ? 4 : 16);
  std::memcpy(query.id.idiag_dst, &destination[v4 ? 12 : 0], v4 ? 4 : 16);
  query.id.idiag_cookie[0] = query.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  return query;
}

// The kernel also finds a listening socket when no other has the addresses.
bool Answers(const inet_diag_msg& found, const SocketAddress& client, const SocketAddress& server) {
  const auto address = [&](const void* bytes) {
    return found.idiag_family == AF_INET ? FromV4(bytes) : FromV6(bytes);
  };
  return found.idiag_state == TCP_ESTABLISHED && found.idiag_inode != 0 &&
         ntohs(found.id.idiag_sport) == PortOf(client) &&
         ntohs(found.id.idiag_dport) == PortOf(server) &&
         address(found.id.idiag_src) == AddressOf(client) &&
         address(found.id.idiag_dst) == AddressOf(server);
}

bool IsEstablished(int connection) {
  tcp_info info = {};
  socklen_t size = sizeof(info);
  return getsockopt(connection, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
         info.tcpi_state == TCP_ESTABLISHED;
}

// The kernel answers before send returns, so nothing here waits.
std::string AskOver(int netlink, const inet_diag_req_v2& query) {
  struct {
    nlmsghdr header;
    inet_diag_req_v2 query;
  } message = {};
  message.header.nlmsg_len = sizeof(message);
  message.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  message.header.nlmsg_flags = NLM_F_REQUEST;
  message.query = query;
  std::string answer(8192, '\0');
  while (recv(netlink, answer.data(), answer.size(), MSG_DONTWAIT) > 0) {  // of an earlier query
  }
  if (send(netlink, &message, sizeof(message), MSG_DONTWAIT) != sizeof(message)) return "";
  const ssize_t bytes = recv(netlink, answer.data(), answer.size(), MSG_DONTWAIT);
  answer.resize(bytes < 0 ? 0 : static_cast<size_t>(bytes));
  return answer;
}

}  // namespace

uid_t OverflowUid() {
  static const uid_t uid = [] {
    uid_t configured = 0;
    std::ifstream file("/proc/sys/kernel/overflowuid");
    return file >> configured ? configured : 65534;
  }();
  return uid;
}

PeerUsers::Ask PeerUsers::AskKernel() {
  const auto netlink = std::make_shared<FileDescriptor>(
      socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  sockaddr_nl kernel = {};
  kernel.nl_family = AF_NETLINK;
  // Connected, so that only the kernel can answer.
  if (connect(netlink->get(), reinterpret_cast<const sockaddr*>(&kernel), sizeof(kernel)) != 0) {
    return [](const inet_diag_req_v2&) { return std::string(); };
  }
  return [netlink](const inet_diag_req_v2& query) { return AskOver(netlink->get(), query); };
}

std::optional<uid_t> PeerUsers::UserOf(int connection, const SocketAddress& peer) const {
  std::optional<uid_t> user;
  if (peer.family() == AF_UNIX) user = UnixPeerUser(connection);
  if (peer.family() == AF_INET || peer.family() == AF_INET6) user = UserOfTcp(connection, peer);
  // Nobody in particular.
  return user == OverflowUid() ? std::nullopt : user;
}

std::optional<uid_t> PeerUsers::UserOfTcp(int connection, const SocketAddress& peer) const {
  if (!IsLoopbackAddress(peer)) return std::nullopt;
  const SocketAddress own = LocalAddress(connection);
  const std::string answer = ask_(Query(peer, own));
  nlmsghdr header;
  inet_diag_msg found;
  if (answer.size() < NLMSG_LENGTH(sizeof(found))) return std::nullopt;  // also of an error
  std::memcpy(&header, answer.data(), sizeof(header));
  std::memcpy(&found, answer.data() + NLMSG_HDRLEN, sizeof(found));
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY || !Answers(found, peer, own)) return std::nullopt;
  // While our end is established, no other client's socket can have these addresses. So what was
  // found is the other end of this connection.
  if (!IsEstablished(connection)) return std::nullopt;
  return found.idiag_uid;
}

}  // namespace flashcore::server
