// Which user of this host is at the other end of a connection, as the kernel knows it.
#ifndef FLASHCORE_SERVER_ACCESS_PEER_USER_H_
#define FLASHCORE_SERVER_ACCESS_PEER_USER_H_

#include <linux/inet_diag.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "server/base/socket.h"

namespace flashcore::server {

// The user id that the kernel reports for users that are not in the user namespace of this process.
uid_t OverflowUid();

// Unix sockets: the user who connected (SO_PEERCRED). TCP over the loopback interface: the user who
// made the client's socket, from the kernel's list of sockets (sock_diag). Not thread-safe.
class PeerUsers {
 public:
  // Sends a query and returns the answer as it comes through netlink; empty: none.
  using Ask = std::function<std::string(const inet_diag_req_v2& query)>;
  // Asks the kernel about the network namespace that this process is in now.
  static Ask AskKernel();

  explicit PeerUsers(Ask ask = AskKernel()) : ask_(std::move(ask)) {}

  // Nullopt if the kernel does not say, for example because the client is on another host, is in
  // another user namespace, or has closed the connection. `peer`: the address of the other end.
  std::optional<uid_t> UserOf(int connection, const SocketAddress& peer) const;

 private:
  std::optional<uid_t> UserOfTcp(int connection, const SocketAddress& peer) const;

  const Ask ask_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_PEER_USER_H_
