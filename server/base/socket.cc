#include "server/base/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/base/interrupted_waits.h"

namespace flashcore::server {
namespace {

// Connections accepted before others get their turn.
constexpr int kAcceptAtOnce = 128;

// How long accepting pauses while the system lacks memory or files.
constexpr std::chrono::milliseconds kRetryAfter(10);

constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

// Connections that the kernel holds until they are accepted. It lowers this to net.core.somaxconn.
constexpr int kBacklog = 4096;

struct AddrinfoDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

void SetFlag(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

void SetPort(SocketAddress* address, int port) {
  const auto network_port = htons(static_cast<uint16_t>(port));
  if (address->family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address->storage)->sin6_port = network_port;
  } else {
    reinterpret_cast<sockaddr_in*>(&address->storage)->sin_port = network_port;
  }
}

bool IsWildcard(const SocketAddress& address) {
  if (address.family() != AF_INET6) return false;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  return IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);
}

// Invalid, with errno set, if the address cannot be listened on.
FileDescriptor ListenOnTcp(const SocketAddress& address) {
  FileDescriptor listening(socket(address.family(), kSocketFlags, 0));
  if (!listening.valid()) return listening;
  SetFlag(listening.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // after a restart
  SetFlag(listening.get(), IPPROTO_TCP, TCP_NODELAY, 1);  // accepted sockets inherit it
  if (address.family() == AF_INET6) {
    SetFlag(listening.get(), IPPROTO_IPV6, IPV6_V6ONLY, IsWildcard(address) ? 0 : 1);
  }
  if (bind(listening.get(), address.get(), address.size) != 0 ||
      listen(listening.get(), kBacklog) != 0) {
    const int error = errno;
    listening.reset();
    errno = error;
  }
  return listening;
}

// Whether nobody listens on the Unix socket. False if the kernel does not say.
bool IsAbandoned(const SocketAddress& address) {
  const FileDescriptor client(socket(AF_UNIX, kSocketFlags, 0));
  return connect(client.get(), address.get(), address.size) != 0 && errno == ECONNREFUSED;
}

absl::Status LastError(absl::string_view what = "") {
  return absl::UnavailableError(absl::StrCat(what, std::strerror(errno)));
}

// Sets what `access` says of the socket file, but of no file that a link leads to.
absl::Status SetAccess(const std::string& path, const UnixSocketAccess& access) {
  if (access.group != UnixSocketAccess::kProcessGroup &&
      lchown(path.c_str(), static_cast<uid_t>(-1), access.group) != 0) {
    return LastError(
        absl::StrCat("it cannot have the group ", access.group, " (--unix_socket_group): "));
  }
  if (fchmodat(AT_FDCWD, path.c_str(), access.mode, AT_SYMLINK_NOFOLLOW) != 0) {
    return LastError("it cannot have its --unix_socket_mode: ");
  }
  return absl::OkStatus();
}

}  // namespace

void FileDescriptor::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

SocketAddress LocalAddress(int socket) {
  SocketAddress address;
  getsockname(socket, address.get(), &address.size);
  return address;
}

int PortOf(const SocketAddress& address) {
  switch (address.family()) {
    case AF_INET:
      return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
    case AF_INET6:
      return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
    default:
      return 0;
  }
}

std::string HostOf(const SocketAddress& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.family() == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
      inet_ntop(AF_INET, &v6->sin6_addr.s6_addr[12], text, sizeof(text));
    } else {
      inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
    }
  } else if (address.family() == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
  }
  return text;
}

bool IsLoopbackAddress(const SocketAddress& address) {
  if (address.family() == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
  }
  if (address.family() != AF_INET) return false;
  const in_addr v4 = reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr;
  return ntohl(v4.s_addr) >> 24 == 127;
}

absl::StatusOr<std::vector<FileDescriptor>> ListenTcp(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("host \"", host, "\": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, AddrinfoDeleter> list(found);
  std::vector<FileDescriptor> sockets;
  std::string why;
  for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
    SetPort(&address, port);
    FileDescriptor listening = ListenOnTcp(address);
    if (!listening.valid()) {
      if (why.empty()) why = std::strerror(errno);
      continue;
    }
    port = PortOf(LocalAddress(listening.get()));
    sockets.push_back(std::move(listening));
  }
  if (sockets.empty()) return absl::UnavailableError(why);
  return sockets;
}

std::optional<uid_t> UnixPeerUser(int socket) {
  ucred user = {};
  socklen_t size = sizeof(user);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return std::nullopt;
  return user.uid;
}

absl::StatusOr<FileDescriptor> ListenUnix(const std::string& path, const UnixSocketAccess& access) {
  SocketAddress address;
  auto* unix_address = reinterpret_cast<sockaddr_un*>(&address.storage);
  if (path.size() >= sizeof(unix_address->sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the path is longer than ", sizeof(unix_address->sun_path) - 1, " bytes"));
  }
  unix_address->sun_family = AF_UNIX;
  path.copy(unix_address->sun_path, path.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  struct stat file;
  if (stat(path.c_str(), &file) == 0 && S_ISSOCK(file.st_mode) && IsAbandoned(address)) {
    unlink(path.c_str());
  }
  FileDescriptor listening(socket(AF_UNIX, kSocketFlags, 0));
  if (!listening.valid() || bind(listening.get(), address.get(), address.size) != 0) {
    return LastError();
  }
  // Before listen: until then the kernel refuses connections.
  absl::Status status = SetAccess(path, access);
  if (status.ok() && listen(listening.get(), kBacklog) != 0) status = LastError();
  if (status.ok()) return listening;
  unlink(path.c_str());
  return status;
}

Acceptor::Acceptor() : spare_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {}

bool Acceptor::AcceptAll(
    int listening_socket,
    absl::FunctionRef<void(FileDescriptor socket, const SocketAddress& peer)> accepted,
    absl::FunctionRef<void()> no_files) {
  for (int i = 0; i < kAcceptAtOnce; ++i) {
    SocketAddress peer;
    FileDescriptor socket(
        accept4(listening_socket, peer.get(), &peer.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      // Urgent bytes then come like others. Else the kernel drops them, and files with them,
      // without a word to whoever reads.
      if (peer.family() == AF_UNIX) SetFlag(socket.get(), SOL_SOCKET, SO_OOBINLINE, 1);
      accepted(std::move(socket), peer);
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return true;
      case EBADF:
      case EINVAL:
      case ENOTSOCK:
      case EOPNOTSUPP:
        return false;
      case EMFILE:
      case ENFILE: {
        spare_.reset();
        bool closed = false;
        {
          const InterruptedWaits interrupted;  // it may be a Unix socket, and have files
          closed = FileDescriptor(accept(listening_socket, nullptr, nullptr)).valid();
        }
        spare_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (closed) {
          no_files();
          continue;
        }
        break;
      }
      case ENOBUFS:
      case ENOMEM:
        break;
      default:  // the connection ended before it was accepted
        continue;
    }
    std::this_thread::sleep_for(kRetryAfter);
    return true;
  }
  return true;
}

}  // namespace flashcore::server
