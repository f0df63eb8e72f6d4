#include "client/c/connection.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "proto/wire/frames.h"
#include "proto/wire/start_thread.h"

namespace flashcore::c {
namespace {

// Fields of LocalRequest and LocalReply.
constexpr uint32_t kId = 1, kStatus = 2, kCall = 7, kCancel = 9;
constexpr size_t kReadBytes = 64 << 10;  // of the socket at a time

Status Gone() { return {kUnavailable, "the server ended the connection", ""}; }

// Moves the first file that came. Replies have at most one, and those with one are never in flight
// together with others: rings are opened one at a time.
File TakeFile(std::deque<File>* files) {
  File file;
  if (!files->empty()) {
    file = std::move(files->front());
    files->pop_front();
  }
  return file;
}

}  // namespace

File::~File() {
  if (fd_ >= 0) close(fd_);
}

Status Connection::Connect(const std::string& path, std::unique_ptr<Connection>* connection) {
  sockaddr_un address = {};
  if (path.size() >= sizeof(address.sun_path)) {
    return {kInvalidArgument,
            "target 'local:" + path + "': the path has " + std::to_string(path.size()) +
                " bytes, and a Unix socket's at most " +
                std::to_string(sizeof(address.sun_path) - 1) +
                "; want local:/path of the server's socket",
            ""};
  }
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  File wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (socket.get() < 0 || wake.get() < 0) {
    return SystemError(kUnavailable, "local:" + path, errno);
  }
  while (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    const bool denied = errno == EACCES || errno == EPERM;
    return SystemError(denied ? kPermissionDenied : kUnavailable, "local:" + path, errno);
  }
  connection->reset(new Connection(std::move(socket), std::move(wake)));
  Connection* const running = connection->get();
  const int error = StartThread(&running->thread_, [running] { running->Run(); });
  if (error != 0) return {kResourceExhausted, NoThreadMessage(error), ""};
  return {};
}

Connection::~Connection() {
  End({kCancelled, "the client was closed", ""});
  if (thread_.joinable()) thread_.join();
}

Status Connection::Exchange(uint32_t field, std::string_view action, int file,
                            Clock::time_point deadline, Reply* reply) {
  Waiting waiting;
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t id = next_id_++;
  Status status = Send(id, field, action, file);
  if (!status.ok()) return status;
  waiting_[id] = &waiting;
  const auto done = [&waiting] { return waiting.done; };
  if (deadline == Clock::time_point::max()) {
    answered_.wait(lock, done);
  } else if (!answered_.wait_until(lock, deadline, done)) {
    waiting_.erase(id);
    if (field == kCall) Send(id, kCancel, "", -1);
    return {kDeadlineExceeded, "the server did not answer in time", ""};
  }
  if (waiting.status.ok()) *reply = std::move(waiting.reply);
  return waiting.status;
}

void Connection::Tell(uint32_t field, std::string_view action) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Send(next_id_++, field, action, -1);
}

// With mutex_.
Status Connection::Send(uint64_t id, uint32_t field, std::string_view action, int file) {
  if (!end_status_.ok()) return end_status_;
  const std::string message = Writer().Number(kId, id).Bytes(field, action).message();
  if (message.size() > wire::kMaxFrameBytes) {
    return {kResourceExhausted,
            "message: " + std::to_string(message.size()) + " bytes, over the " +
                std::to_string(wire::kMaxFrameBytes) + " that the local socket takes",
            ""};
  }
  File copy;
  if (file >= 0) {
    copy = File(fcntl(file, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) return SystemError(kResourceExhausted, "file descriptor", errno);
  }
  out_.push_back({wire::Frame(message), 0, std::move(copy)});
  if (out_.size() > 1 || (SendSome() && out_.empty())) return {};
  const uint64_t one = 1;  // the thread sends the rest, or sees the end
  while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  return {};
}

bool Connection::SendSome() {
  while (!out_.empty()) {
    Frame& frame = out_.front();
    const ssize_t count =
        wire::SendBytes(socket_.get(), std::string_view(frame.bytes).substr(frame.sent),
                        frame.sent == 0 ? frame.file.get() : -1, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN;
    frame.sent += static_cast<size_t>(count);
    if (frame.sent == frame.bytes.size()) out_.pop_front();
  }
  return true;
}

void Connection::End(Status status) {
  std::function<void()> on_end;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!end_status_.ok()) return;
    end_status_ = std::move(status);
    out_.clear();
    for (auto& [id, waiting] : waiting_) {
      waiting->done = true;
      waiting->status = end_status_;
    }
    waiting_.clear();
    ended_.store(true);
    on_end = on_end_;
    answered_.notify_all();
  }
  shutdown(socket_.get(), SHUT_RDWR);  // the thread ends
  if (on_end) on_end();
}

Status Connection::end_status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return end_status_;
}

void Connection::OnEnd(std::function<void()> on_end) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_.load()) {
      on_end_ = std::move(on_end);
      return;
    }
  }
  on_end();
}

void Connection::Run() {
  std::string in;
  std::deque<File> files;
  while (!ended_.load()) {
    pollfd events[] = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!SendSome()) break;
      if (!out_.empty()) events[0].events |= POLLOUT;
    }
    if (poll(events, 2, -1) < 0 && errno != EINTR) break;
    uint64_t count = 0;
    if (events[1].revents != 0 && read(wake_.get(), &count, sizeof(count)) < 0) continue;
    if ((events[0].revents & ~POLLOUT) != 0 && !Receive(&in, &files)) break;
  }
  End(Gone());
}

// False if the connection has ended.
bool Connection::Receive(std::string* in, std::deque<File>* files) {
  const size_t before = in->size();
  in->resize(before + kReadBytes);
  const wire::Received received =
      wire::ReceiveBytes(socket_.get(), &(*in)[before], kReadBytes, MSG_DONTWAIT,
                         [files](int file) { files->push_back(File(file)); });
  const bool none = received.bytes < 0 && errno == EAGAIN;
  in->resize(before + (received.bytes > 0 ? static_cast<size_t>(received.bytes) : 0));
  if (received.bytes <= 0) return none;
  return TakeFrames(in, files);
}

bool Connection::TakeFrames(std::string* in, std::deque<File>* files) {
  size_t begin = 0;
  while (in->size() - begin >= wire::kFrameHeaderBytes) {
    const size_t length = wire::FrameLength(in->data() + begin);
    if (length > wire::kMaxFrameBytes) {
      End({kInternal, "reply: a frame of " + std::to_string(length) + " bytes", ""});
      return false;
    }
    const size_t end = begin + wire::kFrameHeaderBytes + length;
    if (end > in->size()) break;
    TakeReply({in->data() + begin + wire::kFrameHeaderBytes, length}, files);
    begin = end;
  }
  in->erase(0, begin);
  return !ended_.load();
}

void Connection::TakeReply(std::string_view message, std::deque<File>* files) {
  uint64_t id = 0;
  Status status;
  std::string_view result;
  Reader reader(message);
  while (reader.Next()) {
    if (reader.field() == kId) {
      id = reader.number();
    } else if (reader.field() == kStatus) {
      status = DecodeStatus(reader.bytes());
    } else {
      result = reader.bytes();
    }
  }
  if (reader.malformed()) return End({kInternal, "reply: not a LocalReply", ""});
  if (id == 0) return End(status.ok() ? Gone() : std::move(status));
  File file = TakeFile(files);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return;  // nobody waits any more
  Waiting* const waiting = found->second;
  waiting_.erase(found);
  waiting->done = true;
  waiting->status = std::move(status);
  waiting->reply = {std::string(result), std::move(file)};
  answered_.notify_all();
}

}  // namespace flashcore::c
