#include "server/transport/local/ring_session.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/ring.h"
#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/message.h"

namespace flashcore::server::local {
namespace {

// Requests that one ring may hand in before those of other clients may.
constexpr int kMostAtOnce = 8;

// Blocks that a ring keeps for its next requests.
constexpr size_t kMaxFreeBlocks = 64;

}  // namespace

class RingSession::Request final : public Exchange {
 public:
  Request(std::shared_ptr<RingSession> session, const wire::SubmissionSlot& header,
          std::string message)
      : Exchange(session->attend_, RequestMessage(std::move(message))),
        session_(std::move(session)),
        header_(header),
        rpc_(origin_.context, origin_.rpc) {
    operation_.identity = session_->identity_;
    owner_ = session_->regions_;
    operation_.deadline = DeadlineIn(header_.timeout_ns, origin_.fleet->clock());
  }

  const std::shared_ptr<RingSession>& session() const { return session_; }
  uint64_t tag() const { return header_.tag; }

  void Start() {
    absl::Status status = CheckNotDraining(*origin_.context);
    if (status.ok() && header_.reserved != 0) {
      status = absl::InvalidArgumentError("slot: reserved is not 0");
    }
    if (status.ok()) {
      status = ParseSingleAttend(message_.view(), session_->regions_.get(), &operation_, &tensors_);
    }
    Receive(status);
  }

  // Guarded by the session's mutex.
  bool listed = false;        // in RingSession::requests_
  Request* before = nullptr;  // others with its tag
  Request* after = nullptr;

 private:
  void Received(const absl::Status& status) override {
    const size_t room = session_->ring_->max_answer_bytes();
    Exchange::Received(status.ok() ? CheckReplyFits(operation_.request, room, "slot") : status);
  }
  // Deletes it.
  void Complete(const absl::Status& status) override {
    std::string answer;
    if (status.ok()) {
      WriteReply(&operation_, &answer);
    } else {
      WriteError(operation_.request.request_id, status, session_->ring_->max_answer_bytes(),
                 &answer);
    }
    session_->Forget(this);
    rpc_.set_status(status.code());
    scope_.Replying(status);
    session_->ring_->Answer(header_.tag, answer);
    Record();
    Delete(this);
  }

  const std::shared_ptr<RingSession> session_;
  const wire::SubmissionSlot header_;
  RpcScope rpc_;
};

RingSession::RingSession(const Exchange::Origin& attend, UseCount* uses, Identity identity,
                         std::shared_ptr<Regions> regions, std::unique_ptr<Ring> ring,
                         Callbacks callbacks)
    : attend_(attend),
      use_(uses),
      identity_(std::move(identity)),
      regions_(std::move(regions)),
      ring_(std::move(ring)),
      callbacks_(std::move(callbacks)) {
  attend_.context->metrics->local_rings.Increment();
}

RingSession::~RingSession() {
  for (void* block : free_) ::operator delete(block);
  attend_.context->metrics->local_rings.Decrement();
  callbacks_.gone();
}

bool RingSession::Poll() {
  for (int taken = 0; taken < kMostAtOnce; ++taken) {
    if (ended_.load(std::memory_order_relaxed)) return false;
    wire::SubmissionSlot header;
    std::string message;
    const absl::StatusOr<bool> took = ring_->Take(&header, &message);
    if (!took.ok()) {
      ended_ = true;
      callbacks_.broken(took.status());
      return false;
    }
    if (!*took) return taken > 0;
    if (std::exchange(sleeps_, false)) ring_->SetServerSleeps(false);
    Start(new (TakeBlock()) Request(shared_from_this(), header, std::move(message)));
  }
  return true;
}

bool RingSession::Sleep() {
  if (sleeps_ || ended_.load(std::memory_order_relaxed)) return false;
  sleeps_ = true;
  ring_->SetServerSleeps(true);
  return ring_->HasNews();
}

void RingSession::Start(Request* request) {
  {
    MutexLock lock(&mutex_);
    const bool cancelled = CancelledInSlot(started_++, request->tag());
    if (cancelled || ended_) {
      request->Cancel();
    } else {
      List(request);
    }
  }
  request->Start();
}

bool RingSession::CancelledInSlot(uint64_t number, uint64_t tag) {
  if (cancels_.empty()) return false;
  if (number >= cancels_end_) {
    cancels_.clear();
    return false;
  }
  const auto cancel = cancels_.find(tag);
  return cancel != cancels_.end() && number < cancel->second;
}

void RingSession::List(Request* request) {
  request->listed = true;
  Request*& first = requests_[request->tag()];
  request->after = first;
  if (first != nullptr) first->before = request;
  first = request;
}

void* RingSession::TakeBlock() {
  MutexLock lock(&mutex_);
  if (free_.empty()) return ::operator new(sizeof(Request));
  void* const block = free_.back();
  free_.pop_back();
  return block;
}

void RingSession::Delete(Request* request) {
  const std::shared_ptr<RingSession> session = request->session();
  request->~Request();
  {
    MutexLock lock(&session->mutex_);
    if (session->free_.size() < kMaxFreeBlocks) {
      session->free_.push_back(request);
      return;
    }
  }
  ::operator delete(request);
}

void RingSession::Forget(Request* request) {
  MutexLock lock(&mutex_);
  if (!request->listed) return;
  if (request->after != nullptr) request->after->before = request->before;
  if (request->before != nullptr) {
    request->before->after = request->after;
  } else if (request->after != nullptr) {
    requests_[request->tag()] = request->after;
  } else {
    requests_.erase(request->tag());
  }
}

void RingSession::CancelAll(Request* first) {
  for (Request* request = first; request != nullptr; request = request->after) {
    request->listed = false;
    request->Cancel();
  }
}

void RingSession::Cancel(uint64_t tag) {
  MutexLock lock(&mutex_);
  if (const auto found = requests_.find(tag); found != requests_.end()) {
    CancelAll(found->second);
    requests_.erase(found);
  }
  if (started_ >= cancels_end_) cancels_.clear();
  const uint64_t end = started_ + std::min(ring_->submitted() - started_, uint64_t{ring_->slots()});
  // No more tags than slots can be that of a request in a slot.
  if (end == started_ || (cancels_.size() >= ring_->slots() && cancels_.count(tag) == 0)) return;
  cancels_[tag] = end;
  cancels_end_ = end;
}

void RingSession::End() {
  ended_ = true;
  MutexLock lock(&mutex_);
  for (const auto& [tag, first] : requests_) CancelAll(first);
  requests_.clear();
}

}  // namespace flashcore::server::local
