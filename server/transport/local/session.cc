#include "server/transport/local/session.h"

#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/ring.h"
#include "server/transport/convert.h"
#include "server/transport/exchange.h"
#include "server/transport/message.h"

namespace flashcore::server::local {
namespace {

// Requests that one ring may hand in before the next ring may.
constexpr int kMostAtOnce = 8;

// Blocks that a ring keeps for its next requests.
constexpr size_t kMaxFreeBlocks = 64;

}  // namespace

class Session::Request final : public Exchange {
 public:
  Request(Context* context, std::shared_ptr<Session> session, const wire::SubmissionSlot& header,
          std::string message)
      : Exchange({context->methods->fleet(), context->methods->context(), context->attend},
                 std::move(message)),
        session_(std::move(session)),
        header_(header),
        rpc_(origin_.context, origin_.rpc) {
    operation_.identity = session_->identity_;
    operation_.deadline = DeadlineIn(header_.timeout_ns, origin_.fleet->clock());
  }

  const std::shared_ptr<Session>& session() const { return session_; }
  uint64_t tag() const { return header_.tag; }

  void Start() {
    absl::Status status = CheckNotDraining(*origin_.context);
    if (status.ok() && header_.reserved != 0) {
      status = absl::InvalidArgumentError("slot: reserved is not 0");
    }
    if (status.ok()) {
      status = ParseSingleAttend(message_, session_->regions_.get(), &operation_, &tensors_);
    }
    Receive(status);
  }

  size_t place = 0;  // in Session::requests_, and guarded by its mutex

 private:
  void Received(const absl::Status& status) override {
    const size_t room = session_->ring_->max_answer_bytes();
    Exchange::Received(status.ok() ? CheckReplyFits(operation_.request, room, "slot") : status);
  }
  // Deletes it.
  void Complete(const absl::Status& status) override {
    if (status.ok()) {
      WriteReply(&operation_, &text_);
    } else {
      WriteError(operation_.request.request_id, status, session_->ring_->max_answer_bytes(),
                 &text_);
    }
    session_->Forget(this);
    rpc_.set_status(status.code());
    scope_.Replying(status);
    session_->ring_->Answer(header_.tag, text_);
    Record();
    Delete(this);
  }

  const std::shared_ptr<Session> session_;
  const wire::SubmissionSlot header_;
  RpcScope rpc_;
};

Session::Session(Context* context, Identity identity, std::shared_ptr<Regions> regions,
                 std::unique_ptr<Ring> ring, Callbacks callbacks)
    : context_(context),
      use_(&context->uses),
      identity_(std::move(identity)),
      regions_(std::move(regions)),
      ring_(std::move(ring)),
      callbacks_(std::move(callbacks)) {
  context_->metrics().local_rings.Increment();
}

Session::~Session() {
  for (void* block : free_) ::operator delete(block);
  context_->metrics().local_rings.Decrement();
  callbacks_.gone();
}

bool Session::Poll() {
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
    Start(new (TakeBlock()) Request(context_, shared_from_this(), header, std::move(message)));
  }
  return true;
}

void Session::Start(Request* request) {
  {
    MutexLock lock(&mutex_);
    request->place = requests_.size();
    requests_.push_back(request);
    if (ended_) request->Cancel();
  }
  request->Start();
}

void* Session::TakeBlock() {
  MutexLock lock(&mutex_);
  if (free_.empty()) return ::operator new(sizeof(Request));
  void* const block = free_.back();
  free_.pop_back();
  return block;
}

void Session::Delete(Request* request) {
  const std::shared_ptr<Session> session = request->session();
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

void Session::Forget(Request* request) {
  MutexLock lock(&mutex_);
  requests_.back()->place = request->place;
  requests_[request->place] = requests_.back();
  requests_.pop_back();
}

void Session::Cancel(uint64_t tag) {
  MutexLock lock(&mutex_);
  for (Request* request : requests_) {
    if (request->tag() == tag) request->Cancel();
  }
}

void Session::End() {
  ended_ = true;
  MutexLock lock(&mutex_);
  for (Request* request : requests_) request->Cancel();
}

}  // namespace flashcore::server::local
