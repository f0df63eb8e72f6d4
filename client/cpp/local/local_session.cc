#include "client/cpp/local/local_session.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace flashcore::client::local {
namespace {

constexpr size_t kMaxCallRings = 8;  // threads beyond that share the ring of the callbacks
constexpr uint32_t kCallRingSlotBytes = 16 * 1024;

}  // namespace

struct LocalSession::CallRing {
  CallRing(std::shared_ptr<Connection> shared, BlockPool::Block block,
           std::unique_ptr<OpenRing> opened)
      : connection(std::move(shared)),
        memory(std::move(block)),
        open(std::move(opened)),
        end_hook(connection->AddEndHook([this] {
          open->ring().Wake();
          return false;
        })) {}
  ~CallRing() { connection->RemoveEndHook(end_hook); }

  const std::shared_ptr<Connection> connection;
  const BlockPool::Block memory;  // of the ring
  const std::unique_ptr<OpenRing> open;
  const uint64_t end_hook;
  std::shared_ptr<RingRequest> request = std::make_shared<RingRequest>();
  uint64_t tag = 0;
  std::chrono::nanoseconds last_wait{};
};

LocalSession::LocalSession(std::shared_ptr<Connection> connection, const RegionTable* regions,
                           absl::Duration spin)
    : connection_(std::move(connection)),
      regions_(regions),
      spin_(absl::ToChronoNanoseconds(spin)),
      pool_(std::make_shared<BlockPool>(connection_)),
      timelines_(connection_),
      max_call_rings_(kMaxCallRings) {}

LocalSession::~LocalSession() {
  // Lets calls end that nobody waits for any more, before the thread of callbacks is joined.
  connection_->End({kCancelled, "the client has closed the connection", ""});
  absl::MutexLock lock(&async_mutex_);
  if (async_ != nullptr) async_->Stop();
}

absl::Status LocalSession::Call(const google::protobuf::Message& request, SteadyTime deadline,
                                google::protobuf::Message* response) {
  std::string_view method = request.GetDescriptor()->name();
  method.remove_suffix(std::string_view("Request").size());
  std::string reply;
  const Status status = connection_->Call(method, request.SerializeAsString(), deadline, &reply);
  if (!status.ok()) return ToAbsl(status);
  if (response->ParseFromString(reply)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("reply: not a ", response->GetDescriptor()->name()));
}

absl::Status LocalSession::Attend(const AttendRequest& request, SteadyTime deadline,
                                  AttendResult* result) {
  const absl::StatusOr<CallRing*> call_ring = TakeCallRing(deadline);
  if (!call_ring.ok()) return call_ring.status();
  return *call_ring != nullptr ? AttendOn(*call_ring, request, deadline, result)
                               : AttendOnAsync(request, deadline, result);
}

absl::StatusOr<LocalSession::CallRing*> LocalSession::TakeCallRing(SteadyTime deadline) {
  {
    absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < abandoned_.size(); ++i) {
      Ring::Answer answer;
      CallRing* const call_ring = abandoned_[i];
      if (!call_ring->open->ring().Poll(&answer)) continue;
      call_ring->open->ring().Pop();
      call_ring->request->Reset();
      abandoned_.erase(abandoned_.begin() + static_cast<ptrdiff_t>(i--));
      free_.push_back(call_ring);
    }
    if (!free_.empty()) {
      CallRing* const call_ring = free_.back();
      free_.pop_back();
      return call_ring;
    }
    if (call_rings_.size() + opening_ >= max_call_rings_) return nullptr;
    ++opening_;
  }
  BlockPool::Block memory;
  std::unique_ptr<OpenRing> ring;
  const Status status = pool_->Open(/*slots=*/1, kCallRingSlotBytes, deadline, &memory, &ring);
  absl::MutexLock lock(&mutex_);
  --opening_;
  if (!status.ok()) {
    // The server gives no more rings.
    if (status.code != kResourceExhausted || call_rings_.empty()) return ToAbsl(status);
    max_call_rings_ = call_rings_.size();
    return nullptr;
  }
  call_rings_.push_back(
      std::make_unique<CallRing>(connection_, std::move(memory), std::move(ring)));
  return call_rings_.back().get();
}

void LocalSession::ReturnCallRing(CallRing* call_ring) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(call_ring);
}

absl::Status LocalSession::AttendOn(CallRing* call_ring, const AttendRequest& request,
                                    SteadyTime deadline, AttendResult* result) {
  RingRequest& prepared = *call_ring->request;
  absl::Status status = Prepare(request, deadline, &prepared);
  Ring& ring = call_ring->open->ring();
  const SteadyTime begin = std::chrono::steady_clock::now();
  if (status.ok() && deadline <= begin) status = ToAbsl(TooLate());
  result->request_bytes = prepared.Bytes();
  const bool fits =
      prepared.Bytes() <= ring.RequestBytes() && prepared.MaxAnswerBytes() <= ring.AnswerBytes();
  if (!status.ok() || !fits) {
    auto elsewhere = std::exchange(call_ring->request, std::make_shared<RingRequest>());
    ReturnCallRing(call_ring);
    return status.ok() ? RunOnAsync(std::move(elsewhere), deadline, result) : status;
  }
  prepared.Serialize(ring.NextSlot());
  const auto left = std::chrono::nanoseconds(deadline - begin).count();
  call_ring->open->Submit(++call_ring->tag,
                          deadline == SteadyTime::max() ? 0 : static_cast<uint64_t>(left),
                          prepared.Bytes());
  // Spinning pays only if the answer comes while it lasts, as the last one did.
  const auto spin = call_ring->last_wait <= spin_ ? spin_ : spin_ / 16;
  ring.Wait(connection_->ended(), begin + spin, deadline);
  call_ring->last_wait = std::chrono::steady_clock::now() - begin;
  Ring::Answer answer;
  if (!ring.Poll(&answer)) {
    if (connection_->ended()) return end_status();
    call_ring->open->Cancel(call_ring->tag);
    absl::MutexLock lock(&mutex_);
    abandoned_.push_back(call_ring);
    return absl::DeadlineExceededError(kNoAnswer);
  }
  if (answer.malformed || answer.tag != call_ring->tag) {
    connection_->End({kInternal, "reply: malformed completion", ""});
    return absl::InternalError("reply: malformed completion");
  }
  status = prepared.Take({answer.data, answer.bytes}, result);
  ring.Pop();
  prepared.Reset();
  ReturnCallRing(call_ring);
  return status;
}

absl::Status LocalSession::AttendOnAsync(const AttendRequest& request, SteadyTime deadline,
                                         AttendResult* result) {
  auto prepared = std::make_shared<RingRequest>();
  if (absl::Status status = Prepare(request, deadline, prepared.get()); !status.ok()) return status;
  return RunOnAsync(std::move(prepared), deadline, result);
}

absl::Status LocalSession::RunOnAsync(std::shared_ptr<RingRequest> prepared, SteadyTime deadline,
                                      AttendResult* result) {
  const absl::StatusOr<AsyncRing*> ring = async(deadline);
  if (!ring.ok()) return ring.status();
  absl::Status status;
  absl::Notification done;
  (*ring)->Start(std::move(prepared), deadline, [&](absl::Status answer, AttendResult taken) {
    status = std::move(answer);
    *result = std::move(taken);
    done.Notify();
  });
  done.WaitForNotification();
  return status;
}

absl::StatusOr<AsyncRing*> LocalSession::async(SteadyTime deadline) {
  const auto opened = [this] {
    absl::MutexLock lock(&async_mutex_);
    return async_.get();
  };
  if (AsyncRing* const ring = opened(); ring != nullptr) return ring;
  const TimedMutex::Lock open_lock(&open_async_mutex_, deadline);
  if (!open_lock.status().ok()) return ToAbsl(open_lock.status());
  if (AsyncRing* const ring = opened(); ring != nullptr) return ring;
  absl::StatusOr<std::shared_ptr<AsyncRing>> ring = AsyncRing::Open(connection_, pool_, deadline);
  if (!ring.ok()) return ring.status();
  absl::MutexLock lock(&async_mutex_);
  async_ = *std::move(ring);
  return async_.get();
}

}  // namespace flashcore::client::local
