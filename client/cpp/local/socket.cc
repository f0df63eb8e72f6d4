#include "client/cpp/local/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/local_ring.h"

namespace flashcore::client::local {
namespace {

using flashcore::local::kMaxFrameBytes;

constexpr size_t kLengthBytes = 4;
constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;

absl::Status Ended() { return absl::UnavailableError("the server ended the connection"); }

// Takes the descriptor in the control data of a message; closes what is too many.
void TakeFd(const msghdr& header, UniqueFd* fd) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr;
       c = CMSG_NXTHDR(const_cast<msghdr*>(&header), c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(c) + at, sizeof(int));
      *fd = UniqueFd(received);
    }
  }
}

}  // namespace

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) close(fd_);
}

absl::Status CheckPath(absl::string_view path) {
  const auto error = [path](absl::string_view problem) {
    return absl::InvalidArgumentError(absl::StrCat("target 'local:", path, "': ", problem,
                                                   "; want local:/path of the server's socket"));
  };
  if (path.empty()) return error("no path");
  if (path[0] != '/') return error("the path is not absolute");
  if (absl::StrContains(path, '\0')) return error("a zero byte in it");
  if (path.size() > kMaxPathBytes) {
    return error(absl::StrCat("the path has ", path.size(), " bytes, and a Unix socket's at most ",
                              kMaxPathBytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<FrameSocket> FrameSocket::Connect(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto error = [&path](int code) {
    const std::string message = absl::StrCat("local:", path, ": ", strerror(code));
    return code == EACCES || code == EPERM ? absl::PermissionDeniedError(message)
                                           : absl::UnavailableError(message);
  };
  if (fd.get() < 0) return error(errno);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, kMaxPathBytes);
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno != EINTR) return error(errno);
  }
  return FrameSocket(std::move(fd));
}

absl::StatusOr<std::string> FrameOf(absl::string_view message) {
  if (message.size() > kMaxFrameBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("message: ", message.size(),
                                                     " bytes, over the ", kMaxFrameBytes,
                                                     " that the local socket takes"));
  }
  const auto length = static_cast<uint32_t>(message.size());
  std::string frame;
  frame.reserve(kLengthBytes + message.size());
  frame.append(reinterpret_cast<const char*>(&length), kLengthBytes);
  frame.append(message.data(), message.size());
  return frame;
}

absl::Status FrameSocket::TrySend(absl::string_view frame, int fd, size_t* sent) {
  while (*sent < frame.size()) {
    iovec data = {const_cast<char*>(frame.data()) + *sent, frame.size() - *sent};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    if (fd >= 0 && *sent == 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* const c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &fd, sizeof(int));
    }
    const ssize_t count = sendmsg(fd_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      *sent += static_cast<size_t>(count);
      continue;
    }
    if (errno == EINTR) continue;
    return errno == EAGAIN ? absl::OkStatus() : Ended();
  }
  return absl::OkStatus();
}

void FrameSocket::WaitWritable(absl::Duration time) {
  pollfd writable = {fd_.get(), POLLOUT, 0};
  poll(&writable, 1, static_cast<int>(absl::ToInt64Milliseconds(time)));
}

absl::Status FrameSocket::Receive(std::string* message, UniqueFd* fd) {
  *fd = UniqueFd();
  uint32_t length = 0;
  // Exactly `size` bytes.
  const auto receive = [this, fd](char* to, size_t size) {
    while (size > 0) {
      iovec data = {to, size};
      alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
      msghdr header = {};
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      const ssize_t count = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      TakeFd(header, fd);
      to += count;
      size -= static_cast<size_t>(count);
    }
    return true;
  };
  if (!receive(reinterpret_cast<char*>(&length), kLengthBytes)) return Ended();
  if (length > kMaxFrameBytes) {
    return absl::InternalError(
        absl::StrCat("reply: a frame of ", length, " bytes; want at most ", kMaxFrameBytes));
  }
  message->resize(length);
  return receive(message->data(), length) ? absl::OkStatus() : Ended();
}

void FrameSocket::Shutdown() { shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace flashcore::client::local
