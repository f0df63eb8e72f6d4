// Frames and file descriptors over a connection of the local socket; see local.proto.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_FRAME_SOCKET_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_FRAME_SOCKET_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/wire/frames.h"
#include "server/base/clock.h"
#include "server/base/socket.h"
#include "server/transport/unsent_replies.h"

namespace flashcore::server::local {

// Never blocks. Not thread-safe.
class FrameSocket {
 public:
  // File descriptors that may have come without the request that they are for.
  static constexpr size_t kMaxFiles = wire::kMaxFilesAtOnce;

  // `socket` is non-blocking. `unsent` and `clock` outlive this.
  FrameSocket(FileDescriptor socket, UnsentReplies* unsent, const Clock* clock)
      : socket_(std::move(socket)), unsent_(unsent), clock_(clock) {}

  int fd() const { return socket_.get(); }

  // Reads what has arrived, up to a limit. UNAVAILABLE: the client is gone or sends no more;
  // INVALID_ARGUMENT: it has sent too many file descriptors.
  absl::Status Read();
  // The next frame, until the next call of Read; nullopt: it has not completely arrived.
  // INVALID_ARGUMENT if it has more than `max_bytes`.
  absl::StatusOr<std::optional<absl::string_view>> Next(size_t max_bytes);
  // The oldest file descriptor. Nullopt: none has come. Not valid: one has come, but the process
  // can open no more files.
  std::optional<FileDescriptor> TakeFile();
  // Every frame that has arrived was taken, but not every file descriptor.
  bool HasStrayFiles() const { return begin_ == in_.size() && !files_.empty(); }

  // Sends a frame, now or later, with a file descriptor that stays open until then; -1: none. What
  // the client does not read is charged to `client`.
  void Send(const std::string& message, int file, absl::string_view client);
  // Sends what the socket takes. False: the client is gone.
  bool Flush();
  size_t unsent_bytes() const { return unsent_bytes_; }
  TimePoint last_progress() const { return last_progress_; }  // of sending

 private:
  struct Frame {
    std::string bytes;
    int file = -1;
    std::unique_ptr<UnsentReply> charge;
  };

  FileDescriptor socket_;
  UnsentReplies* const unsent_;
  const Clock* const clock_;
  std::string in_;    // what was read
  size_t begin_ = 0;  // of the part of in_ that was not taken
  bool too_many_files_ = false;
  std::deque<FileDescriptor> files_;
  std::deque<Frame> out_;
  size_t sent_ = 0;  // bytes of the first frame
  size_t unsent_bytes_ = 0;
  TimePoint last_progress_{};
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_FRAME_SOCKET_H_
