#include "client/cpp/local/control.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/status.h"
#include "proto/wire/ring.h"
#include "proto/wire/start_thread.h"

namespace flashcore::client::local {
namespace {

constexpr absl::Duration kTellTimeout = absl::Seconds(5);

}  // namespace

SteadyTime ToSteady(absl::Time deadline) {
  const absl::Duration left = deadline - absl::Now();
  if (left > absl::Hours(24 * 365)) return SteadyTime::max();
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(left);
}

absl::StatusOr<std::shared_ptr<Control>> Control::Connect(const std::string& path,
                                                          const std::string& client,
                                                          absl::Time deadline) {
  absl::StatusOr<FrameSocket> socket = FrameSocket::Connect(path);
  if (!socket.ok()) return socket.status();
  auto control = absl::WrapUnique(new Control(*std::move(socket)));
  Control* const reading = control.get();
  const int error = StartThread(&control->reader_, [reading] { reading->Read(); });
  if (error != 0) return absl::ResourceExhaustedError(NoThreadMessage(error));
  absl::Status status = control->Hello(client, deadline);
  if (status.ok()) return std::shared_ptr<Control>(std::move(control));
  return absl::Status(status.code(), absl::StrCat("local:", path, ": ", status.message()));
}

Control::~Control() {
  socket_.Shutdown();
  if (reader_.joinable()) reader_.join();
}

absl::Status Control::Hello(const std::string& client, absl::Time deadline) {
  v1::LocalRequest request;
  request.mutable_hello()->set_min_version(wire::kLocalVersion);
  request.mutable_hello()->set_max_version(wire::kLocalVersion);
  request.mutable_hello()->set_client(client);
  const absl::StatusOr<v1::LocalReply> reply = Exchange(&request, -1, deadline);
  if (!reply.ok()) return reply.status();
  if (reply->hello().version() != wire::kLocalVersion) {
    return absl::InternalError(
        absl::StrCat("reply: version ", reply->hello().version(), " of the local protocol"));
  }
  identity_ = reply->hello().identity();
  return absl::OkStatus();
}

absl::Status Control::end_status() const {
  absl::MutexLock lock(&mutex_);
  return end_status_;
}

absl::StatusOr<uint64_t> Control::Start(v1::LocalRequest* request, int fd, absl::Time deadline,
                                        Done done) {
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!end_status_.ok()) return end_status_;
    id = next_id_++;
    waiting_[id] = std::move(done);
  }
  request->set_id(id);
  absl::Status status = outbox_.Send(id, request->SerializeAsString(), fd, deadline);
  if (status.ok()) return id;
  absl::MutexLock lock(&mutex_);
  // If the connection has ended, `done` has run, or will.
  if (waiting_.erase(id) == 0) return id;
  return status;
}

absl::StatusOr<v1::LocalReply> Control::Exchange(v1::LocalRequest* request, int fd,
                                                 absl::Time deadline, UniqueFd* reply_fd) {
  struct Result {
    absl::Notification done;
    absl::Status status;
    v1::LocalReply reply;
    UniqueFd fd;
  };
  const auto result = std::make_shared<Result>();  // the reply may come after the deadline
  const absl::StatusOr<uint64_t> id = Start(
      request, fd, deadline, [result](absl::Status status, v1::LocalReply* reply, UniqueFd got) {
        result->status = std::move(status);
        if (reply != nullptr) result->reply.Swap(reply);
        result->fd = std::move(got);
        result->done.Notify();
      });
  if (!id.ok()) return id.status();
  if (!result->done.WaitForNotificationWithDeadline(deadline)) {
    if (request->has_call()) CancelCall(*id);
    return absl::DeadlineExceededError(kNoAnswer);
  }
  if (!result->status.ok()) return result->status;
  if (reply_fd != nullptr) *reply_fd = std::move(result->fd);
  return std::move(result->reply);
}

void Control::Tell(v1::LocalRequest* request) {
  {
    absl::MutexLock lock(&mutex_);
    if (!end_status_.ok()) return;
    request->set_id(next_id_++);
  }
  SendQuietly(*request);
}

void Control::CancelCall(uint64_t id) {
  v1::LocalRequest request;
  request.set_id(id);
  request.mutable_cancel();
  SendQuietly(request);
}

void Control::SendQuietly(const v1::LocalRequest& request) {
  constexpr uint64_t kNobodyWaits = 0;
  outbox_.Send(kNobodyWaits, request.SerializeAsString(), -1, absl::Now() + kTellTimeout)
      .IgnoreError();
}

absl::StatusOr<std::string> Control::Call(absl::string_view method, std::string message,
                                          absl::Time deadline) {
  const absl::Duration left = deadline - absl::Now();
  if (left <= absl::ZeroDuration())
    return absl::DeadlineExceededError("the deadline passed before the request was sent");
  v1::LocalRequest request;
  request.mutable_call()->set_method(std::string(method));
  request.mutable_call()->set_message(std::move(message));
  if (deadline != absl::InfiniteFuture()) {
    request.mutable_call()->set_timeout_ns(static_cast<uint64_t>(absl::ToInt64Nanoseconds(left)));
  }
  absl::StatusOr<v1::LocalReply> reply = Exchange(&request, -1, deadline);
  if (!reply.ok()) return reply.status();
  return std::move(*reply->mutable_message());
}

absl::StatusOr<std::string> Control::Register(int fd, size_t bytes, bool read_only,
                                              absl::Time deadline) {
  v1::LocalRequest request;
  request.mutable_register_memory()->set_bytes(bytes);
  request.mutable_register_memory()->set_read_only(read_only);
  absl::StatusOr<v1::LocalReply> reply = Exchange(&request, fd, deadline);
  if (!reply.ok()) return reply.status();
  if (reply->register_memory().region_id().empty()) {
    return absl::InternalError("reply: no region_id");
  }
  return std::move(*reply->mutable_register_memory()->mutable_region_id());
}

void Control::Unregister(const std::string& region_id) {
  v1::LocalRequest request;
  request.mutable_unregister_memory()->set_region_id(region_id);
  Tell(&request);
}

uint64_t Control::AddEndHook(std::function<void()> hook) {
  absl::MutexLock lock(&mutex_);
  if (!end_status_.ok()) hook();
  const uint64_t id = next_id_++;
  end_hooks_[id] = std::move(hook);
  return id;
}

void Control::RemoveEndHook(uint64_t id) {
  absl::MutexLock lock(&mutex_);
  end_hooks_.erase(id);
}

void Control::Abort(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    abort_status_.Update(status);
  }
  socket_.Shutdown();
}

void Control::End(absl::Status status) {
  std::vector<Done> unanswered;
  {
    absl::MutexLock lock(&mutex_);
    if (!abort_status_.ok()) status = abort_status_;
    end_status_ = status;
    ended_.store(true);
    for (auto& [id, done] : waiting_) unanswered.push_back(std::move(done));
    waiting_.clear();
    for (const auto& [id, hook] : end_hooks_) hook();
  }
  socket_.Shutdown();
  for (const Done& done : unanswered) done(status, nullptr, {});
}

void Control::Read() {
  std::string message;
  UniqueFd fd;
  v1::LocalReply reply;
  while (true) {
    const absl::Status status = socket_.Receive(&message, &fd);
    if (!status.ok()) return End(status);
    if (!reply.ParseFromString(message)) {
      return End(absl::InternalError("reply: not a LocalReply"));
    }
    if (reply.id() == 0) {
      const absl::Status why = FromMessage(reply.status());
      return End(why.ok() ? absl::UnavailableError("the server ended the connection") : why);
    }
    Take(&reply, std::move(fd));
  }
}

void Control::Take(v1::LocalReply* reply, UniqueFd fd) {
  const Done done = TakeDone(reply->id());
  if (done == nullptr) return;
  const absl::Status status = FromMessage(reply->status());
  done(status, status.ok() ? reply : nullptr, std::move(fd));
}

void Control::Expire(uint64_t id) {
  const Done done = TakeDone(id);
  if (done == nullptr) return;
  done(absl::DeadlineExceededError("the server does not read its local socket"), nullptr, {});
}

Control::Done Control::TakeDone(uint64_t id) {
  absl::MutexLock lock(&mutex_);
  const auto it = waiting_.find(id);
  if (it == waiting_.end()) return nullptr;
  Done done = std::move(it->second);
  waiting_.erase(it);
  return done;
}

absl::StatusOr<std::unique_ptr<OpenRing>> OpenRing::Open(std::shared_ptr<Control> control,
                                                         std::byte* memory,
                                                         const std::string& region_id,
                                                         size_t offset, uint32_t slots,
                                                         uint32_t slot_bytes, absl::Time deadline) {
  std::memset(memory, 0, wire::RingBytes(slots, slot_bytes));
  v1::LocalRequest request;
  request.mutable_open_ring()->set_region_id(region_id);
  request.mutable_open_ring()->set_offset(offset);
  request.mutable_open_ring()->set_slots(slots);
  request.mutable_open_ring()->set_slot_bytes(slot_bytes);
  UniqueFd doorbell;
  const absl::StatusOr<v1::LocalReply> reply = control->Exchange(&request, -1, deadline, &doorbell);
  if (!reply.ok()) return reply.status();
  if (doorbell.get() < 0) return absl::InternalError("reply: no doorbell");
  return absl::WrapUnique(new OpenRing(std::move(control), reply->open_ring().ring(),
                                       std::move(doorbell), memory, slots, slot_bytes));
}

OpenRing::OpenRing(std::shared_ptr<Control> control, uint32_t number, UniqueFd doorbell,
                   std::byte* memory, uint32_t slots, uint32_t slot_bytes)
    : control_(std::move(control)),
      number_(number),
      doorbell_(std::move(doorbell)),
      ring_(memory, slots, slot_bytes) {}

OpenRing::~OpenRing() {
  v1::LocalRequest request;
  request.mutable_close_ring()->set_ring(number_);
  control_->Tell(&request);
}

void OpenRing::Submit(uint64_t tag, uint64_t timeout_ns, size_t bytes) {
  if (!ring_.Submit(tag, timeout_ns, bytes)) return;
  const uint64_t one = 1;
  while (write(doorbell_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void OpenRing::Cancel(uint64_t tag) {
  v1::LocalRequest request;
  request.mutable_cancel()->set_ring(number_);
  request.mutable_cancel()->set_tag(tag);
  request.mutable_cancel()->set_in_ring(true);
  control_->Tell(&request);
}

}  // namespace flashcore::client::local
