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
#include "server/base/socket.h"
#include "server/transport/rpc/passed_files.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server::local {

// Never blocks. Not thread-safe.
class FrameSocket {
 public:
  // File descriptors that may have come without the request that they are for.
  static constexpr size_t kMaxFiles = wire::kMaxFilesAtOnce;

  // `socket` is non-blocking; `client`: see ConnectionClient. `passed_files` closes it,
  // and what comes with it. `on_cut_off` ends the connection, whose client does not read. The
  // pointers outlive this.
  FrameSocket(FileDescriptor socket, std::string client, PassedFiles* passed_files,
              UnsentReplies* unsent, UnsentReply::OnCutOff on_cut_off)
      : socket_(std::move(socket)),
        client_(std::move(client)),
        passed_files_(passed_files),
        unsent_(unsent),
        on_cut_off_(std::move(on_cut_off)) {}
  ~FrameSocket();
  FrameSocket(const FrameSocket&) = delete;
  FrameSocket& operator=(const FrameSocket&) = delete;

  int fd() const { return socket_.get(); }

  // Reads what has arrived, up to a limit. UNAVAILABLE: the client is gone or sends no more;
  // INVALID_ARGUMENT: it has sent too many file descriptors.
  absl::Status Read();
  // The next frame, until the next call of Next or Read; nullopt: it has not completely arrived.
  // INVALID_ARGUMENT if it has more than `max_bytes`.
  absl::StatusOr<std::optional<absl::string_view>> Next(size_t max_bytes);
  // Memory of what has arrived and was not taken.
  size_t received_bytes() const { return in_.capacity(); }
  // The oldest file descriptor, which is memory and which PassedFiles has to close.
  // INVALID_ARGUMENT: none has come, or one that is no memory. RESOURCE_EXHAUSTED: one has come,
  // but the process can open no more files, or too many of the client are still to be closed.
  absl::StatusOr<FileDescriptor> TakeFile();
  // Every frame that has arrived was taken, but not every file descriptor.
  bool HasStrayFiles() const { return begin_ == in_.size() && !files_.empty(); }

  // The client has passed more files at once than it may.
  bool too_many_files() const { return too_many_files_; }

  // A file descriptor to send; null: none.
  using SentFile = std::shared_ptr<const FileDescriptor>;
  // Sends a frame, now or later, with a file descriptor. Unread bytes are charged to `client`.
  // False: the client is gone.
  bool Send(const std::string& message, SentFile file, absl::string_view client);
  // Sends what the socket takes. False: the client is gone.
  bool Flush();
  // Memory of the frames that are not completely sent.
  size_t unsent_bytes() const { return unsent_bytes_; }

 private:
  void AddFile(FileDescriptor file);
  // Gives the memory of the frames that were taken back, and makes room for the next one.
  std::nullopt_t Incomplete(size_t frame_bytes);

  struct Frame {
    std::string bytes;
    SentFile file;
    size_t charged_bytes = 0;
    std::unique_ptr<UnsentReply> charge;  // null: it was sent at once
  };

  FileDescriptor socket_;
  const std::string client_;
  PassedFiles* const passed_files_;
  UnsentReplies* const unsent_;
  const UnsentReply::OnCutOff on_cut_off_;
  std::string in_;    // what was read
  size_t begin_ = 0;  // of the part of in_ that was not taken
  bool too_many_files_ = false;
  std::deque<absl::StatusOr<FileDescriptor>> files_;
  std::deque<Frame> out_;
  size_t sent_ = 0;  // bytes of the first frame
  size_t unsent_bytes_ = 0;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_FRAME_SOCKET_H_
