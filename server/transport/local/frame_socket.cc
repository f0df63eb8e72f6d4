#include "server/transport/local/frame_socket.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace flashcore::server::local {
namespace {

constexpr size_t kReadAtOnce = size_t{64} << 10;
// Shrinks the buffer after a large frame.
constexpr size_t kKeepBytes = size_t{64} << 10;

}  // namespace

absl::Status FrameSocket::Read() {
  if (begin_ > 0) {
    in_.erase(0, begin_);
    begin_ = 0;
    if (in_.capacity() > 2 * kKeepBytes && in_.size() < kKeepBytes) in_.shrink_to_fit();
  }
  thread_local std::array<char, kReadAtOnce> buffer;
  size_t came = 0;
  const wire::Received received = wire::ReceiveBytes(socket_.get(), buffer.data(), buffer.size(),
                                                     MSG_DONTWAIT, [this, &came](int file) {
                                                       files_.emplace_back(file);
                                                       ++came;
                                                     });
  if (received.bytes < 0 && errno == EAGAIN) return absl::OkStatus();
  if (received.bytes <= 0) return absl::UnavailableError("the client is gone");
  in_.append(buffer.data(), static_cast<size_t>(received.bytes));
  if (received.lost_files) {
    if (came == 0) {  // the process can open no more files
      files_.emplace_back();
    } else {
      too_many_files_ = true;
    }
  }
  if (!too_many_files_ && files_.size() <= kMaxFiles) return absl::OkStatus();
  return absl::InvalidArgumentError("frame: more file descriptors than requests for them");
}

absl::StatusOr<std::optional<absl::string_view>> FrameSocket::Next(size_t max_bytes) {
  const size_t available = in_.size() - begin_;
  if (available < wire::kFrameHeaderBytes) return std::nullopt;
  const size_t length = wire::FrameLength(in_.data() + begin_);
  if (length > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame: ", length, " bytes; at most ", max_bytes, " are allowed"));
  }
  if (available - wire::kFrameHeaderBytes < length) return std::nullopt;
  const absl::string_view frame(in_.data() + begin_ + wire::kFrameHeaderBytes, length);
  begin_ += wire::kFrameHeaderBytes + length;
  return frame;
}

std::optional<FileDescriptor> FrameSocket::TakeFile() {
  if (files_.empty()) return std::nullopt;
  std::optional<FileDescriptor> file(std::move(files_.front()));
  files_.pop_front();
  return file;
}

void FrameSocket::Send(const std::string& message, int file, absl::string_view client) {
  if (out_.empty()) last_progress_ = clock_->Now();
  Frame& frame = out_.emplace_back();
  frame.bytes = wire::Frame(message);
  frame.file = file;
  unsent_bytes_ += frame.bytes.size();
  if (!Flush() || out_.empty()) return;
  Frame& last = out_.back();
  last.charge = std::make_unique<UnsentReply>(unsent_, nullptr);
  last.charge->Ready(client, sizeof(Frame) + last.bytes.size());
}

bool FrameSocket::Flush() {
  while (!out_.empty()) {
    Frame& frame = out_.front();
    const ssize_t bytes =
        wire::SendBytes(socket_.get(), std::string_view(frame.bytes).substr(sent_),
                        sent_ == 0 ? frame.file : -1, MSG_DONTWAIT);
    if (bytes < 0 && errno == EAGAIN) return true;
    if (bytes < 0) return false;
    sent_ += static_cast<size_t>(bytes);
    unsent_bytes_ -= static_cast<size_t>(bytes);
    last_progress_ = clock_->Now();
    if (sent_ < frame.bytes.size()) continue;
    out_.pop_front();
    sent_ = 0;
  }
  return true;
}

}  // namespace flashcore::server::local
