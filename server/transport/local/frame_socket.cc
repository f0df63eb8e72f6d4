#include "server/transport/local/frame_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kReadAtOnce = size_t{64} << 10;
constexpr size_t kHeaderBytes = 4;  // the length of the message, little-endian

// Shrinks the buffer after a large frame.
constexpr size_t kKeepBytes = size_t{64} << 10;

uint32_t LengthAt(const char* bytes) {
  std::array<uint8_t, kHeaderBytes> header;
  std::memcpy(header.data(), bytes, header.size());
  return header[0] | header[1] << 8 | header[2] << 16 | uint32_t{header[3]} << 24;
}

std::string Header(size_t length) {
  std::string header;
  for (size_t i = 0; i < kHeaderBytes; ++i) header += static_cast<char>(length >> 8 * i & 0xff);
  return header;
}

// Room for kMaxFiles descriptors, aligned for a cmsghdr.
union ControlBuffer {
  char bytes[CMSG_SPACE(FrameSocket::kMaxFiles * sizeof(int))];
  cmsghdr align;
};

}  // namespace

absl::Status FrameSocket::Read() {
  if (begin_ > 0) {
    in_.erase(0, begin_);
    begin_ = 0;
    if (in_.capacity() > 2 * kKeepBytes && in_.size() < kKeepBytes) in_.shrink_to_fit();
  }
  thread_local std::array<char, kReadAtOnce> buffer;
  iovec to = {buffer.data(), buffer.size()};
  ControlBuffer control;
  msghdr message = {};
  message.msg_iov = &to;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t bytes = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
  if (bytes <= 0) return absl::UnavailableError("the client is gone");
  in_.append(buffer.data(), static_cast<size_t>(bytes));
  KeepFiles(message);
  if (!too_many_files_ && files_.size() <= kMaxFiles) return absl::OkStatus();
  return absl::InvalidArgumentError("frame: more file descriptors than requests for them");
}

void FrameSocket::KeepFiles(const msghdr& message) {
  size_t came = 0;
  for (const cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(const_cast<msghdr*>(&message), const_cast<cmsghdr*>(part))) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i, ++came) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      files_.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) == 0) return;
  // Either the process can open no more files, or they were more than the buffer has room for.
  if (came == 0) {
    files_.emplace_back();
  } else {
    too_many_files_ = true;
  }
}

absl::StatusOr<std::optional<absl::string_view>> FrameSocket::Next(size_t max_bytes) {
  const size_t available = in_.size() - begin_;
  if (available < kHeaderBytes) return std::nullopt;
  const size_t length = LengthAt(in_.data() + begin_);
  if (length > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame: ", length, " bytes; at most ", max_bytes, " are allowed"));
  }
  if (available - kHeaderBytes < length) return std::nullopt;
  const absl::string_view frame(in_.data() + begin_ + kHeaderBytes, length);
  begin_ += kHeaderBytes + length;
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
  frame.bytes = absl::StrCat(Header(message.size()), message);
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
    iovec from = {frame.bytes.data() + sent_, frame.bytes.size() - sent_};
    ControlBuffer control = {};
    msghdr message = {};
    message.msg_iov = &from;
    message.msg_iovlen = 1;
    if (frame.file >= 0 && sent_ == 0) {
      message.msg_control = control.bytes;
      message.msg_controllen = CMSG_SPACE(sizeof(int));
      cmsghdr* const part = CMSG_FIRSTHDR(&message);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(part), &frame.file, sizeof(int));
    }
    const ssize_t bytes = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return true;
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

}  // namespace flashcore::server
