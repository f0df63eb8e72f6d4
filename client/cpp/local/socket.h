// The local socket: frames and file descriptors. Internal to the client; proto/flashcore/v1/
// local.proto describes it.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_SOCKET_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_SOCKET_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace flashcore::client::local {

// Owns a file descriptor; -1: none.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// INVALID_ARGUMENT unless `path` is absolute and short enough for a Unix socket.
absl::Status CheckPath(absl::string_view path);

// A connected socket. One thread may send while another receives; Shutdown is safe from any.
class FrameSocket {
 public:
  // UNAVAILABLE if nobody listens at `path`, PERMISSION_DENIED if this user may not connect.
  static absl::StatusOr<FrameSocket> Connect(const std::string& path);

  // Sends `message` as one frame, with `fd` unless it is -1. DEADLINE_EXCEEDED, and nothing was
  // sent, if the server does not read; UNAVAILABLE if the socket has ended or a frame is stuck
  // half-way: then the socket is shut down.
  absl::Status Send(absl::string_view message, int fd, absl::Time deadline);

  // Blocks for the next frame, and its file descriptor if it has one. UNAVAILABLE at the end.
  absl::Status Receive(std::string* message, UniqueFd* fd);

  void Shutdown();  // ends Send and Receive

 private:
  explicit FrameSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_SOCKET_H_
