// A TCP connection of this process with itself.
#ifndef FLASHCORE_TESTS_BASE_LOOPBACK_CONNECTION_H_
#define FLASHCORE_TESTS_BASE_LOOPBACK_CONNECTION_H_

#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "server/base/socket.h"

namespace flashcore::server::testing {

struct LoopbackConnection {
  // Invalid descriptors if this machine lacks the address.
  explicit LoopbackConnection(const std::string& host) {
    auto sockets = ListenTcp(host, 0);
    if (!sockets.ok()) return;
    listening = std::move(sockets->front());
    const SocketAddress address = LocalAddress(listening.get());
    client = FileDescriptor(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    Connect(address);
  }
  // `client` connects to `listening`, which has the address `to`.
  void Connect(const SocketAddress& to) {
    if (connect(client.get(), to.get(), to.size) != 0) return;
    pollfd ready = {listening.get(), POLLIN, 0};
    poll(&ready, 1, 60'000);
    peer = SocketAddress();
    server = FileDescriptor(accept(listening.get(), peer.get(), &peer.size));
  }

  FileDescriptor listening, client, server;
  SocketAddress peer;  // as accept says
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_BASE_LOOPBACK_CONNECTION_H_
