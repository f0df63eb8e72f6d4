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
#include "proto/wire/frames.h"

namespace flashcore::client::local {
namespace {

constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;

absl::Status Ended() { return absl::UnavailableError("the server ended the connection"); }

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
  if (message.size() > wire::kMaxFrameBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("message: ", message.size(),
                                                     " bytes, over the ", wire::kMaxFrameBytes,
                                                     " that the local socket takes"));
  }
  return wire::Frame({message.data(), message.size()});
}

absl::Status FrameSocket::TrySend(absl::string_view frame, int fd, size_t* sent) {
  while (*sent < frame.size()) {
    const ssize_t count = wire::SendBytes(fd_.get(), {frame.data() + *sent, frame.size() - *sent},
                                          *sent == 0 ? fd : -1, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN ? absl::OkStatus() : Ended();
    *sent += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

void FrameSocket::WaitWritable(absl::Duration time) {
  pollfd writable = {fd_.get(), POLLOUT, 0};
  poll(&writable, 1, static_cast<int>(absl::ToInt64Milliseconds(time)));
}

absl::Status FrameSocket::Receive(std::string* message, UniqueFd* fd) {
  *fd = UniqueFd();
  // Exactly `size` bytes.
  const auto receive = [this, fd](char* to, size_t size) {
    while (size > 0) {
      const wire::Received received = wire::ReceiveBytes(fd_.get(), to, size, /*flags=*/0,
                                                         [fd](int file) { *fd = UniqueFd(file); });
      if (received.bytes <= 0) return false;
      to += received.bytes;
      size -= static_cast<size_t>(received.bytes);
    }
    return true;
  };
  char header[wire::kFrameHeaderBytes];
  if (!receive(header, sizeof(header))) return Ended();
  const uint32_t length = wire::FrameLength(header);
  if (length > wire::kMaxFrameBytes) {
    return absl::InternalError(
        absl::StrCat("reply: a frame of ", length, " bytes; want at most ", wire::kMaxFrameBytes));
  }
  message->resize(length);
  return receive(message->data(), length) ? absl::OkStatus() : Ended();
}

void FrameSocket::Shutdown() { shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace flashcore::client::local
