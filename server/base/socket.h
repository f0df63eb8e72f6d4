// Listening sockets, and accepting on them when the process may not open more files.
#ifndef FLASHCORE_SERVER_BASE_SOCKET_H_
#define FLASHCORE_SERVER_BASE_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace flashcore::server {

// Owns an open file; -1: none.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// The address of one end of a socket.
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(sockaddr_storage);

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  std::string bytes() const { return {reinterpret_cast<const char*>(&storage), size}; }
};

SocketAddress LocalAddress(int socket);
// 0 for a Unix socket.
int PortOf(const SocketAddress& address);
// Without the port, such as "127.0.0.1" or "::1"; an IPv4 address mapped to IPv6 as IPv4.
std::string HostOf(const SocketAddress& address);
// 127.0.0.0/8, also mapped to IPv6, and ::1.
bool IsLoopbackAddress(const SocketAddress& address);

// The user of the process that connected a Unix socket, as this process's user namespace numbers
// users (SO_PEERCRED). Nullopt if the kernel does not say.
std::optional<uid_t> UnixPeerUser(int socket);

// Listening sockets, one for each address of `host`, a name or a number; all on one port. Port 0: a
// free one. INVALID_ARGUMENT if the host is unknown, UNAVAILABLE if no address can be listened on.
// "::" includes IPv4.
absl::StatusOr<std::vector<FileDescriptor>> ListenTcp(const std::string& host, int port);

// The users that may connect to a Unix socket: those who may write its file.
struct UnixSocketAccess {
  static constexpr gid_t kProcessGroup = static_cast<gid_t>(-1);  // or that of the folder

  mode_t mode = 0660;  // whatever the umask is
  gid_t group = kProcessGroup;
};

// Replaces a socket file that nobody listens on. UNAVAILABLE if somebody may, if the file cannot be
// made, or if it cannot have the group of `access`. Nobody can connect before `access` holds.
absl::StatusOr<FileDescriptor> ListenUnix(const std::string& path,
                                          const UnixSocketAccess& access = {});

// Accepts connections, also when no file can be opened: then it closes them at once, with a file
// that it keeps in reserve. Not thread-safe.
class Acceptor {
 public:
  Acceptor();

  // Hands those that wait to `accepted`, non-blocking; calls `no_files` for each that it closed.
  // After some it returns although more wait, so that others get their turn. While the system lacks
  // memory or files, it sleeps for a moment. False: the socket will never accept again.
  bool AcceptAll(int listening_socket,
                 absl::FunctionRef<void(FileDescriptor socket, const SocketAddress& peer)> accepted,
                 absl::FunctionRef<void()> no_files);

 private:
  FileDescriptor spare_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_SOCKET_H_
