#include "server/transport/local/frame_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/base/interrupted_waits.h"
#include "server/memory/shared_region.h"

namespace flashcore::server::local {
namespace {

constexpr size_t kReadAtOnce = size_t{64} << 10;
// A larger buffer shrinks when most of it is taken.
constexpr size_t kKeepBytes = 4096;
// The memory of an unsent frame besides its bytes.
constexpr size_t kUnsentFrameBytes = 256;

absl::Status NoRoom(absl::string_view why) {
  return WithInfo(absl::ResourceExhaustedError(absl::StrCat("file: ", why)), reason::kServerFull);
}

}  // namespace

FrameSocket::~FrameSocket() {
  for (absl::StatusOr<FileDescriptor>& file : files_) {
    if (file.ok()) passed_files_->Close(client_, *std::move(file));
  }
  passed_files_->CloseConnection(client_, std::move(socket_));
}

absl::Status FrameSocket::Read() {
  thread_local std::array<char, kReadAtOnce> buffer;
  const bool has_room = passed_files_->HasRoom(client_);
  std::vector<FileDescriptor> files;
  const auto on_file = [&files](int file) { files.emplace_back(file); };
  wire::Received received;
  {
    const InterruptedWaits interrupted;  // for files that are lost
    received = wire::ReceiveBytes(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT,
                                  has_room ? on_file : std::function<void(int)>());
  }
  if (received.bytes < 0 && errno == EAGAIN) return absl::OkStatus();
  if (received.bytes <= 0) return absl::UnavailableError("the client is gone");
  in_.append(buffer.data(), static_cast<size_t>(received.bytes));
  for (FileDescriptor& file : files) AddFile(std::move(file));
  if (received.lost_files) {
    if (files.empty()) {
      files_.emplace_back(NoRoom(has_room ? "the server can open no more files"
                                          : "the file systems of files of this user do not let the "
                                            "server close them"));
    } else {
      too_many_files_ = true;
    }
  }
  if (!too_many_files_ && files_.size() <= kMaxFiles) return absl::OkStatus();
  return absl::InvalidArgumentError("frame: more file descriptors than requests for them");
}

void FrameSocket::AddFile(FileDescriptor file) {
  absl::Status status = SharedRegion::CheckIsMemory(file);
  if (status.ok()) {
    files_.emplace_back(std::move(file));
  } else {
    passed_files_->Close(client_, std::move(file));
    files_.emplace_back(std::move(status));
  }
}

absl::StatusOr<std::optional<absl::string_view>> FrameSocket::Next(size_t max_bytes) {
  const size_t available = in_.size() - begin_;
  if (available < wire::kFrameHeaderBytes) return Incomplete(wire::kFrameHeaderBytes);
  const size_t length = wire::FrameLength(in_.data() + begin_);
  if (length > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame: ", length, " bytes; at most ", max_bytes, " are allowed"));
  }
  if (available - wire::kFrameHeaderBytes < length) {
    return Incomplete(wire::kFrameHeaderBytes + length);
  }
  const absl::string_view frame(in_.data() + begin_ + wire::kFrameHeaderBytes, length);
  begin_ += wire::kFrameHeaderBytes + length;
  return frame;
}

std::nullopt_t FrameSocket::Incomplete(size_t frame_bytes) {
  in_.erase(0, begin_);
  begin_ = 0;
  if (in_.capacity() > std::max({kKeepBytes, 2 * in_.size(), 2 * frame_bytes})) in_.shrink_to_fit();
  if (frame_bytes > in_.capacity()) in_.reserve(frame_bytes);  // else it would grow by doubling
  return std::nullopt;
}

absl::StatusOr<FileDescriptor> FrameSocket::TakeFile() {
  if (files_.empty()) {
    return absl::InvalidArgumentError("file: no file descriptor came with the request");
  }
  absl::StatusOr<FileDescriptor> file = std::move(files_.front());
  files_.pop_front();
  return file;
}

bool FrameSocket::Send(const std::string& message, SentFile file, absl::string_view client) {
  Frame& frame = out_.emplace_back();
  frame.bytes = wire::Frame(message);
  frame.file = std::move(file);
  if (!Flush()) return false;
  if (out_.empty()) return true;
  Frame& last = out_.back();
  last.charged_bytes = kUnsentFrameBytes + last.bytes.capacity();
  last.charge = std::make_unique<UnsentReply>(unsent_, on_cut_off_);
  unsent_bytes_ += last.charged_bytes;
  last.charge->Ready(client, last.charged_bytes);
  return true;
}

bool FrameSocket::Flush() {
  while (!out_.empty()) {
    Frame& frame = out_.front();
    const int file = sent_ == 0 && frame.file != nullptr ? frame.file->get() : -1;
    const ssize_t bytes = wire::SendBytes(
        socket_.get(), std::string_view(frame.bytes).substr(sent_), file, MSG_DONTWAIT);
    if (bytes < 0 && errno == EAGAIN) return true;
    if (bytes < 0) return false;
    sent_ += static_cast<size_t>(bytes);
    if (sent_ < frame.bytes.size()) continue;
    unsent_bytes_ -= frame.charged_bytes;
    out_.pop_front();
    sent_ = 0;
  }
  return true;
}

}  // namespace flashcore::server::local
