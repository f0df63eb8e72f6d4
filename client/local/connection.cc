#include "client/local/connection.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>

#include "client/local/fields.h"
#include "client/local/timed_mutex.h"
#include "proto/wire/frames.h"
#include "proto/wire/ring.h"
#include "proto/wire/start_thread.h"

namespace flashcore::client::local {
namespace {

using Clock = std::chrono::steady_clock;

// Fields of LocalRequest and LocalReply.
constexpr uint32_t kId = 1, kStatus = 2;
constexpr uint32_t kHello = 2, kRegister = 3, kUnregister = 4, kOpenRing = 5, kCloseRing = 6,
                   kCall = 7, kCancel = 9;
constexpr uint32_t kRing = 1;      // of LocalOpenRingResult, LocalCloseRing and LocalCancel
constexpr uint32_t kRegionId = 1;  // of every message that has one

constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;
constexpr std::chrono::seconds kTellTimeout(5);
// How often the thread looks for late frames while the server does not read, and runs end hooks.
constexpr int kTickMs = 20;

Status Gone() { return {kUnavailable, "the server ended the connection", ""}; }

std::string CallAction(std::string_view method, std::string_view message, SteadyTime deadline) {
  constexpr uint32_t kMethod = 1, kMessage = 2, kTimeout = 3;
  Writer call;
  call.Bytes(kMethod, method).Bytes(kMessage, message);
  if (const uint64_t timeout = TimeoutNs(deadline); timeout > 0) call.Number(kTimeout, timeout);
  return call.message();
}

// Adds 1 to an eventfd.
void Signal(const File& event) {
  const uint64_t one = 1;
  while (write(event.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

}  // namespace

Status CheckPath(std::string_view path) {
  const auto error = [path](const std::string& problem) -> Status {
    return {kInvalidArgument,
            "target 'local:" + std::string(path) + "': " + problem +
                "; want local:/path of the server's socket",
            ""};
  };
  if (path.empty()) return error("no path");
  if (path[0] != '/') return error("the path is not absolute");
  if (path.find('\0') != path.npos) return error("a zero byte in it");
  if (path.size() > kMaxPathBytes) {
    return error("the path has " + std::to_string(path.size()) +
                 " bytes, and a Unix socket's at most " + std::to_string(kMaxPathBytes));
  }
  return {};
}

uint64_t TimeoutNs(SteadyTime deadline) {
  if (deadline == SteadyTime::max()) return 0;
  const std::chrono::nanoseconds left = deadline - Clock::now();
  return static_cast<uint64_t>(std::max<int64_t>(1, left.count()));
}

Status Connection::Connect(const std::string& path, std::shared_ptr<Connection>* connection) {
  const std::string target = "local:" + path;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, kMaxPathBytes);
  File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) return SystemError(kUnavailable, target, errno);
  while (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    const bool denied = errno == EACCES || errno == EPERM;
    return SystemError(denied ? kPermissionDenied : kUnavailable, target, errno);
  }
  return Start(std::move(socket), connection);
}

Status Connection::Start(File socket, std::shared_ptr<Connection>* connection) {
  File wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake.get() < 0) return SystemError(kUnavailable, "eventfd", errno);
  std::shared_ptr<Connection> made(new Connection(std::move(socket), std::move(wake)));
  const int error = StartThread(&made->thread_, [running = made.get()] { running->Run(); });
  if (error != 0) return {kResourceExhausted, NoThreadMessage(error), ""};
  *connection = std::move(made);
  return {};
}

Connection::~Connection() {
  End({kCancelled, "the client was closed", ""});
  if (thread_.joinable()) thread_.join();
}

Status Connection::Hello(const std::string& client, SteadyTime deadline) {
  constexpr uint32_t kMinVersion = 1, kMaxVersion = 2, kClient = 3;  // of LocalHello
  constexpr uint32_t kVersion = 1, kIdentity = 2;                    // of LocalHelloResult
  Writer hello;
  hello.Number(kMinVersion, wire::kLocalVersion).Number(kMaxVersion, wire::kLocalVersion);
  hello.Bytes(kClient, client);
  Reply reply;
  Status status = Exchange(kHello, hello.message(), -1, deadline, &reply);
  if (!status.ok()) return status;
  identity_ = BytesField(reply.result, kIdentity);
  const uint64_t version = NumberField(reply.result, kVersion);
  if (version == wire::kLocalVersion) return {};
  return {kInternal, "reply: version " + std::to_string(version) + " of the local protocol", ""};
}

Status Connection::end_status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return end_status_;
}

Status Connection::Send(uint32_t field, std::string_view action, int file, SteadyTime deadline,
                        Done done, uint64_t* id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  *id = next_id_++;
  Status status = Queue(*id, field, action, file, deadline);
  if (status.ok()) waiting_[*id] = std::move(done);
  return status;
}

Status Connection::Exchange(uint32_t field, std::string_view action, int file, SteadyTime deadline,
                            Reply* reply) {
  struct Answer {
    bool done = false;
    Status status;
    Reply reply;
  };
  const auto answer = std::make_shared<Answer>();  // the reply may come after the deadline
  const auto take = [this, answer](Status status, Reply got) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *answer = {true, std::move(status), std::move(got)};
    answered_.notify_all();
  };
  uint64_t id = 0;
  Status status = Send(field, action, file, deadline, take, &id);
  if (!status.ok()) return status;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!WaitUntil(&answered_, &lock, deadline, [&answer] { return answer->done; })) {
    waiting_.erase(id);
    if (field == kCall) Queue(id, kCancel, "", -1, Clock::now() + kTellTimeout);
    return {kDeadlineExceeded, kNoReply, ""};
  }
  if (answer->status.ok()) *reply = std::move(answer->reply);
  return answer->status;
}

void Connection::Tell(uint32_t field, std::string_view action) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Queue(next_id_++, field, action, -1, Clock::now() + kTellTimeout);
}

void Connection::CancelCall(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Queue(id, kCancel, "", -1, Clock::now() + kTellTimeout);
}

Status Connection::Call(std::string_view method, std::string_view message, SteadyTime deadline,
                        std::string* response) {
  if (Clock::now() >= deadline) return TooLate();
  Reply reply;
  Status status = Exchange(kCall, CallAction(method, message, deadline), -1, deadline, &reply);
  if (status.ok()) *response = std::move(reply.result);
  return status;
}

Status Connection::StartCall(std::string_view method, std::string_view message, SteadyTime deadline,
                             SteadyTime send_by, Done done, uint64_t* id) {
  return Send(kCall, CallAction(method, message, deadline), -1, send_by, std::move(done), id);
}

Status Connection::Register(const Memory& memory, bool read_only, SteadyTime deadline,
                            std::string* region_id) {
  constexpr uint32_t kBytes = 1, kReadOnly = 2;
  Writer action;
  action.Number(kBytes, memory.bytes()).Number(kReadOnly, read_only ? 1 : 0);
  Reply reply;
  Status status = Exchange(kRegister, action.message(), memory.file(), deadline, &reply);
  if (!status.ok()) return status;
  *region_id = BytesField(reply.result, kRegionId);
  if (region_id->size() == kRegionIdBytes) return {};
  return {kInternal, "reply: a region_id of " + std::to_string(region_id->size()) + " bytes", ""};
}

void Connection::Unregister(const std::string& region_id) {
  Tell(kUnregister, Writer().Bytes(kRegionId, region_id).message());
}

Status Connection::Queue(uint64_t id, uint32_t field, std::string_view action, int file,
                         SteadyTime deadline) {
  if (!end_status_.ok()) return end_status_;
  const std::string message = Writer().Number(kId, id).Bytes(field, action).message();
  if (message.size() > wire::kMaxFrameBytes) {
    return {kResourceExhausted,
            "message: " + std::to_string(message.size()) + " bytes, over the " +
                std::to_string(wire::kMaxFrameBytes) + " that the local socket takes",
            ""};
  }
  File copy;  // the caller may close its own
  if (file >= 0) {
    copy = File(fcntl(file, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) return {kResourceExhausted, "the process may open too few files", ""};
  }
  out_.push_back({id, wire::Frame(message), 0, std::move(copy), deadline});
  if (out_.size() == 1) SendSome();
  if (!out_.empty()) Signal(wake_);  // the thread sends the rest
  return {};
}

void Connection::SendSome() {
  while (!out_.empty()) {
    Frame& frame = out_.front();
    const ssize_t count =
        wire::SendBytes(socket_.get(), std::string_view(frame.bytes).substr(frame.sent),
                        frame.sent == 0 ? frame.file.get() : -1, MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN) return;
    if (count < 0) {
      out_.clear();
      // The server has ended it: the thread reads to the end, where the server may say why.
      if (errno != EPIPE && errno != ECONNRESET) shutdown(socket_.get(), SHUT_RDWR);
      return;
    }
    frame.sent += static_cast<size_t>(count);
    if (frame.sent == frame.bytes.size()) out_.pop_front();
  }
}

// Half a frame cannot be taken back.
void Connection::TakeLate(std::vector<Done>* late) {
  const SteadyTime now = Clock::now();
  const auto is_late = [&](const Frame& frame) { return frame.sent == 0 && frame.deadline <= now; };
  for (const Frame& frame : out_) {
    if (is_late(frame)) late->push_back(TakeDone(frame.id));
  }
  out_.erase(std::remove_if(out_.begin(), out_.end(), is_late), out_.end());
}

Connection::Done Connection::TakeDone(uint64_t id) {
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return nullptr;
  Done done = std::move(found->second);
  waiting_.erase(found);
  return done;
}

uint64_t Connection::AddEndHook(EndHook hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t id = next_id_++;
  if (ended_.load()) {
    hook();
  } else {
    end_hooks_[id] = std::move(hook);
  }
  return id;
}

void Connection::RemoveEndHook(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_hooks_.erase(id);
  Signal(wake_);  // the thread may wait to run it again
}

bool Connection::RunEndHooks() {
  for (auto hook = end_hooks_.begin(); hook != end_hooks_.end();) {
    hook = hook->second() ? std::next(hook) : end_hooks_.erase(hook);
  }
  return !end_hooks_.empty();
}

void Connection::End(Status status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!end_status_.ok()) return;
  end_status_ = std::move(status);
  out_.clear();
  ended_.store(true);
  RunEndHooks();
  shutdown(socket_.get(), SHUT_RDWR);  // the thread ends, and with it what waits for a reply
}

void Connection::Run() {
  while (!ended_.load()) {
    pollfd events[] = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    int timeout = -1;
    std::vector<Done> late;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      SendSome();
      TakeLate(&late);
      if (!out_.empty()) {
        events[0].events |= POLLOUT;
        timeout = kTickMs;
      }
    }
    for (const Done& done : late) {
      if (done != nullptr) {
        done({kDeadlineExceeded, "the server does not read its local socket", ""}, {});
      }
    }
    if (poll(events, 2, timeout) < 0 && errno != EINTR) break;
    uint64_t count = 0;
    if (events[1].revents != 0 && read(wake_.get(), &count, sizeof(count)) < 0) continue;
    if ((events[0].revents & ~POLLOUT) != 0 && !Receive()) break;
  }
  End(Gone());
  std::map<uint64_t, Done> unanswered;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    unanswered.swap(waiting_);
  }
  for (const auto& [id, done] : unanswered) done(end_status(), {});
  const auto run_hooks = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return RunEndHooks();
  };
  pollfd wake = {wake_.get(), POLLIN, 0};
  uint64_t count = 0;
  while (run_hooks()) {
    if (poll(&wake, 1, kTickMs) > 0 && read(wake_.get(), &count, sizeof(count)) < 0) continue;
  }
}

// Takes bytes of one frame, and no more: so a file is of the frame in which it comes.
bool Connection::Receive() {
  constexpr size_t kHeader = wire::kFrameHeaderBytes;
  size_t end = 0;
  while (true) {
    end = kHeader + (received_ >= kHeader ? wire::FrameLength(in_.data()) : 0);
    if (received_ == end) break;
    if (end > kHeader + wire::kMaxFrameBytes) {
      End({kInternal,
           "reply: a frame of " + std::to_string(end - kHeader) + " bytes; want at most " +
               std::to_string(wire::kMaxFrameBytes),
           ""});
      return false;
    }
    if (in_.size() < end) in_.resize(end);
    const wire::Received received =
        wire::ReceiveBytes(socket_.get(), &in_[received_], end - received_, MSG_DONTWAIT,
                           [this](int file) { in_file_ = File(file); });
    if (received.bytes < 0 && errno == EAGAIN) return true;
    if (received.bytes <= 0) return false;
    received_ += static_cast<size_t>(received.bytes);
  }
  received_ = 0;
  TakeReply({in_.data() + kHeader, end - kHeader}, std::exchange(in_file_, File()));
  return !ended_.load();
}

void Connection::TakeReply(std::string_view message, File file) {
  uint64_t id = 0, field = 0;
  Status status;
  std::string_view result;
  Reader reader(message);
  while (reader.Next()) {
    if (reader.field() == kId) {
      id = reader.number();
    } else if (reader.field() == kStatus) {
      status = DecodeStatus(reader.bytes());
    } else {
      field = reader.field();
      result = reader.bytes();
    }
  }
  if (reader.malformed()) return End({kInternal, "reply: not a LocalReply", ""});
  if (id == 0) return End(status.ok() ? Gone() : std::move(status));
  Done done;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done = TakeDone(id);
  }
  if (done == nullptr) return DropReply(field, result);
  Reply reply;
  if (status.ok()) reply = {std::string(result), std::move(file)};
  done(std::move(status), std::move(reply));
}

void Connection::DropReply(uint64_t field, std::string_view result) {
  constexpr uint64_t kRegistered = 4, kAllocated = 7;  // fields of LocalReply
  if (field == kRegistered || field == kAllocated) Unregister(BytesField(result, kRegionId));
}

Status OpenRing::Open(std::shared_ptr<Connection> connection, std::byte* memory,
                      const std::string& region_id, size_t offset, uint32_t slots,
                      uint32_t slot_bytes, SteadyTime deadline, std::unique_ptr<OpenRing>* ring) {
  constexpr uint32_t kOffset = 2, kSlots = 3, kSlotBytes = 4;
  Writer action;
  action.Bytes(kRegionId, region_id).Number(kOffset, offset);
  action.Number(kSlots, slots).Number(kSlotBytes, slot_bytes);
  Connection::Reply reply;
  Status status = connection->Exchange(kOpenRing, action.message(), -1, deadline, &reply);
  if (!status.ok()) return status;
  if (reply.file.get() < 0) return {kInternal, "reply: no doorbell", ""};
  ring->reset(new OpenRing(std::move(connection), NumberField(reply.result, kRing),
                           std::move(reply.file), memory, slots, slot_bytes));
  return {};
}

OpenRing::~OpenRing() { connection_->Tell(kCloseRing, Writer().Number(kRing, number_).message()); }

void OpenRing::Submit(uint64_t tag, uint64_t timeout_ns, size_t bytes) {
  if (ring_.Submit(tag, timeout_ns, bytes)) Signal(doorbell_);
}

void OpenRing::Cancel(uint64_t tag) {
  constexpr uint32_t kTag = 2, kInRing = 3;
  connection_->Tell(kCancel,
                    Writer().Number(kRing, number_).Number(kTag, tag).Number(kInRing, 1).message());
}

}  // namespace flashcore::client::local
