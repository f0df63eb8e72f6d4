// An address where nobody listens.
#ifndef FLASHCORE_TESTS_CLIENT_UNUSED_PORT_H_
#define FLASHCORE_TESTS_CLIENT_UNUSED_PORT_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace flashcore {

// A port of 127.0.0.1 that refuses connections. It is bound, so that no other program gets it.
class UnusedPort {
 public:
  UnusedPort() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(socket_, generic, size) != 0 || getsockname(socket_, generic, &size) != 0) {
      std::abort();
    }
    port_ = ntohs(address.sin_port);
  }
  ~UnusedPort() { close(socket_); }
  UnusedPort(const UnusedPort&) = delete;
  UnusedPort& operator=(const UnusedPort&) = delete;

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  const int socket_;
  int port_ = 0;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_UNUSED_PORT_H_
