// A file whose last close lasts an hour, and what passes it.
#ifndef FLASHCORE_TESTS_BASE_LINGERING_SOCKET_H_
#define FLASHCORE_TESTS_BASE_LINGERING_SOCKET_H_

#include <fcntl.h>
#include <sys/socket.h>

#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "proto/wire/frames.h"
#include "server/base/socket.h"

namespace flashcore::server::testing {

// One end of a TCP connection, with SO_LINGER and more bytes than the other end has room for, which
// reads nothing until ReadAll.
class LingeringSocket {
 public:
  LingeringSocket() {
    auto listening = ListenTcp("127.0.0.1", 0);
    EXPECT_TRUE(listening.ok());
    SocketAddress address = LocalAddress(listening->front().get());
    end_ = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int few = 4096, more = 65536;
    setsockopt(listening->front().get(), SOL_SOCKET, SO_RCVBUF, &few, sizeof(few));
    setsockopt(end_.get(), SOL_SOCKET, SO_SNDBUF, &more, sizeof(more));
    EXPECT_EQ(connect(end_.get(), address.get(), address.size), 0);
    fcntl(listening->front().get(), F_SETFL, 0);  // waits for the connection
    reader_ = FileDescriptor(accept4(listening->front().get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger hour = {1, 3600};
    EXPECT_EQ(setsockopt(end_.get(), SOL_SOCKET, SO_LINGER, &hour, sizeof(hour)), 0);
    const std::string bytes(65536, 'x');
    ssize_t sent = 0;
    while ((sent = send(end_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0) sent_ += sent;
  }

  FileDescriptor Take() { return std::move(end_); }
  // Whether it is closed: what was sent comes, and then the end. Waits for it.
  bool IsClosed() {
    std::string buffer(65536, '\0');
    ssize_t read = 0, all = 0;
    while ((read = recv(reader_.get(), buffer.data(), buffer.size(), 0)) > 0) all += read;
    return read == 0 && all == sent_;
  }

 private:
  FileDescriptor end_, reader_;
  ssize_t sent_ = 0;
};

// Sends a byte with the file over a Unix socket.
inline void Pass(int unix_socket, int file) {
  EXPECT_EQ(wire::SendBytes(unix_socket, "x", file, /*flags=*/0), 1);
}

// The ends of a Unix connection, or of a pipe.
struct Ends {
  FileDescriptor first, second;
};

inline Ends Pair() {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

// A lingering socket that is nowhere but in the queue of `to`.
inline void PassLingering(LingeringSocket* socket, const FileDescriptor& to) {
  const FileDescriptor file = socket->Take();
  Pass(to.get(), file.get());
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_BASE_LINGERING_SOCKET_H_
