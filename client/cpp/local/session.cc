#include "client/cpp/local/session.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/synchronization/notification.h"
#include "client/cpp/status.h"

namespace flashcore::client::local {
namespace {

constexpr size_t kMaxLanes = 8;  // threads beyond that share the ring of the callbacks
constexpr uint32_t kLaneSlotBytes = 16 * 1024;

}  // namespace

struct Session::Lane {
  Lane(std::shared_ptr<Control> shared, Arena::Block block, std::unique_ptr<OpenRing> opened)
      : control(std::move(shared)),
        memory(std::move(block)),
        open(std::move(opened)),
        end_hook(control->AddEndHook([this] { open->ring().Wake(); })) {}
  ~Lane() { control->RemoveEndHook(end_hook); }

  const std::shared_ptr<Control> control;
  const Arena::Block memory;  // of the ring
  const std::unique_ptr<OpenRing> open;
  const uint64_t end_hook;
  std::shared_ptr<RingRequest> request = std::make_shared<RingRequest>();
  uint64_t tag = 0;
  std::chrono::nanoseconds last_wait{};
};

Session::Session(std::shared_ptr<Control> control, const RegionTable* regions, absl::Duration spin)
    : control_(std::move(control)),
      regions_(regions),
      spin_(absl::ToChronoNanoseconds(spin)),
      arena_(std::make_shared<Arena>(control_)),
      max_lanes_(kMaxLanes) {}

Session::~Session() {
  // Lets calls end that nobody waits for any more, before the thread of callbacks is joined.
  control_->Abort(absl::CancelledError("the client has closed the connection"));
  absl::MutexLock lock(&async_mutex_);
  if (async_ != nullptr) async_->Stop();
}

absl::Status Session::Attend(const AttendRequest& request, absl::Time deadline,
                             AttendResult* result) {
  const absl::StatusOr<Lane*> lane = TakeLane(deadline);
  if (!lane.ok()) return lane.status();
  return *lane != nullptr ? AttendOn(*lane, request, deadline, result)
                          : AttendOnAsync(request, deadline, result);
}

absl::StatusOr<Session::Lane*> Session::TakeLane(absl::Time deadline) {
  {
    absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < abandoned_.size(); ++i) {
      Ring::Answer answer;
      Lane* const lane = abandoned_[i];
      if (!lane->open->ring().Poll(&answer)) continue;
      lane->open->ring().Pop();
      lane->request->Reset();
      abandoned_.erase(abandoned_.begin() + static_cast<ptrdiff_t>(i--));
      free_.push_back(lane);
    }
    if (!free_.empty()) {
      Lane* const lane = free_.back();
      free_.pop_back();
      return lane;
    }
    if (lanes_.size() + opening_ >= max_lanes_) return nullptr;
    ++opening_;
  }
  Arena::Block memory;
  absl::StatusOr<std::unique_ptr<OpenRing>> ring =
      arena_->Open(/*slots=*/1, kLaneSlotBytes, deadline, &memory);
  absl::MutexLock lock(&mutex_);
  --opening_;
  if (!ring.ok()) {
    // The server gives no more rings.
    if (!absl::IsResourceExhausted(ring.status()) || lanes_.empty()) return ring.status();
    max_lanes_ = lanes_.size();
    return nullptr;
  }
  lanes_.push_back(std::make_unique<Lane>(control_, std::move(memory), *std::move(ring)));
  return lanes_.back().get();
}

void Session::ReturnLane(Lane* lane) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(lane);
}

absl::Status Session::AttendOn(Lane* lane, const AttendRequest& request, absl::Time deadline,
                               AttendResult* result) {
  RingRequest& prepared = *lane->request;
  absl::Status status = Prepare(request, deadline, &prepared);
  Ring& ring = lane->open->ring();
  const SteadyTime begin = std::chrono::steady_clock::now();
  const SteadyTime end = ToSteady(deadline);
  if (status.ok() && end <= begin)
    status = absl::DeadlineExceededError("the deadline passed before the request was sent");
  result->request_bytes = prepared.Bytes();
  const bool fits =
      prepared.Bytes() <= ring.RequestBytes() && prepared.MaxAnswerBytes() <= ring.AnswerBytes();
  if (!status.ok() || !fits) {
    auto elsewhere = std::exchange(lane->request, std::make_shared<RingRequest>());
    ReturnLane(lane);
    return status.ok() ? RunOnAsync(std::move(elsewhere), deadline, result) : status;
  }
  prepared.Serialize(ring.NextSlot());
  const auto left = std::chrono::nanoseconds(end - begin).count();
  lane->open->Submit(++lane->tag, end == SteadyTime::max() ? 0 : static_cast<uint64_t>(left),
                     prepared.Bytes());
  // Spinning pays only if the answer comes while it lasts, as the last one did.
  const auto spin = lane->last_wait <= spin_ ? spin_ : spin_ / 16;
  ring.Wait(control_->ended(), begin + spin, end);
  lane->last_wait = std::chrono::steady_clock::now() - begin;
  Ring::Answer answer;
  if (!ring.Poll(&answer)) {
    if (control_->ended()) return control_->end_status();
    lane->open->Cancel(lane->tag);
    absl::MutexLock lock(&mutex_);
    abandoned_.push_back(lane);
    return absl::DeadlineExceededError(kNoAnswer);
  }
  if (answer.malformed || answer.tag != lane->tag) {
    control_->Abort(absl::InternalError("reply: malformed completion"));
    return absl::InternalError("reply: malformed completion");
  }
  status = prepared.Take({answer.data, answer.bytes}, result);
  ring.Pop();
  prepared.Reset();
  ReturnLane(lane);
  return status;
}

absl::Status Session::AttendOnAsync(const AttendRequest& request, absl::Time deadline,
                                    AttendResult* result) {
  auto prepared = std::make_shared<RingRequest>();
  if (absl::Status status = Prepare(request, deadline, prepared.get()); !status.ok()) return status;
  return RunOnAsync(std::move(prepared), deadline, result);
}

absl::Status Session::RunOnAsync(std::shared_ptr<RingRequest> prepared, absl::Time deadline,
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

absl::StatusOr<AsyncRing*> Session::async(absl::Time deadline) {
  const auto opened = [this] {
    absl::MutexLock lock(&async_mutex_);
    return async_.get();
  };
  if (AsyncRing* const ring = opened(); ring != nullptr) return ring;
  const TimedMutex::Lock open_lock(&open_async_mutex_, deadline);
  if (!open_lock.status().ok()) return open_lock.status();
  if (AsyncRing* const ring = opened(); ring != nullptr) return ring;
  absl::StatusOr<std::shared_ptr<AsyncRing>> ring = AsyncRing::Open(control_, arena_, deadline);
  if (!ring.ok()) return ring.status();
  absl::MutexLock lock(&async_mutex_);
  async_ = *std::move(ring);
  return async_.get();
}

}  // namespace flashcore::client::local
