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

// `message` as one frame. RESOURCE_EXHAUSTED if it is too large for one.
absl::StatusOr<std::string> FrameOf(absl::string_view message);

// A connected socket. One thread may send while another receives; Shutdown is safe from any.
class FrameSocket {
 public:
  // UNAVAILABLE if nobody listens at `path`, PERMISSION_DENIED if this user may not connect.
  static absl::StatusOr<FrameSocket> Connect(const std::string& path);
  // Of a connected stream socket.
  explicit FrameSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  // Sends as many bytes of `frame` from *sent on as the socket takes at once, and counts them in
  // *sent. `fd`, unless it is -1, goes with the first. UNAVAILABLE if the socket has ended.
  absl::Status TrySend(absl::string_view frame, int fd, size_t* sent);

  // Waits until the socket takes bytes or has ended, for at most `time`.
  void WaitWritable(absl::Duration time);

  // Blocks for the next frame, and its file descriptor if it has one. UNAVAILABLE at the end.
  absl::Status Receive(std::string* message, UniqueFd* fd);

  void Shutdown();  // ends everything else

 private:
  UniqueFd fd_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_SOCKET_H_
