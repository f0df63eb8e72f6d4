#include "server/transport/local/ring_session.h"

#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/transport/convert.h"
#include "server/transport/message.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {
namespace {

// Requests that one ring may hand in before it is the turn of the next one.
constexpr int kTurn = 8;

// Blocks that a ring keeps for its next requests.
constexpr size_t kMaxFreeBlocks = 64;

}  // namespace

struct RingSession::Request {
  Request(LocalContext* context, std::shared_ptr<RingSession> its_session,
          const local::SubmissionSlot& its_header, std::string its_message)
      : session(std::move(its_session)),
        header(its_header),
        message(std::move(its_message)),
        receiver(context->methods->fleet(), context->attend, message, &operation),
        rpc(context->methods->context(), context->attend),
        scope(context->methods->context(), context->attend) {}

  const std::shared_ptr<RingSession> session;
  const local::SubmissionSlot header;
  std::string message;  // of the slot; then of the answer
  AttendOperation operation;
  TensorReceiver receiver;
  size_t place = 0;  // in RingSession::requests_
  RpcScope rpc;
  RequestScope scope;
};

RingSession::RingSession(LocalContext* context, Identity identity, std::shared_ptr<Regions> regions,
                         std::unique_ptr<Ring> ring, Callbacks callbacks)
    : context_(context),
      use_(&context->uses),
      identity_(std::move(identity)),
      regions_(std::move(regions)),
      ring_(std::move(ring)),
      callbacks_(std::move(callbacks)) {
  context_->metrics().local_rings.Increment();
}

RingSession::~RingSession() {
  for (void* block : free_) ::operator delete(block);
  context_->metrics().local_rings.Decrement();
  callbacks_.gone();
}

bool RingSession::Poll() {
  for (int taken = 0; taken < kTurn; ++taken) {
    if (ended_.load(std::memory_order_relaxed)) return false;
    local::SubmissionSlot header;
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

void RingSession::Start(Request* request) {
  RpcContext* const context = context_->methods->context();
  Fleet* const fleet = context_->methods->fleet();
  {
    MutexLock lock(&mutex_);
    request->place = requests_.size();
    requests_.push_back(request);
    if (ended_) request->operation.Cancel();
  }
  AttendOperation* const operation = &request->operation;
  operation->identity = identity_;
  operation->deadline = DeadlineIn(request->header.timeout_ns, fleet->clock());
  operation->done = [request](const absl::Status& result) {
    request->session->Complete(request, result);
  };
  absl::Status status = CheckNotDraining(*context);
  bool well_formed = false;
  if (status.ok() && request->header.reserved != 0) {
    status = absl::InvalidArgumentError("slot: reserved is not 0");
  }
  if (status.ok()) {
    status = ParseAttend(wire::MessageView(request->message), regions_.get(), operation,
                         &request->receiver.tensors, &well_formed);
  }
  request->receiver.Receive(status, [request](const absl::Status& received) {
    request->session->Enqueue(request, received);
  });
}

void RingSession::Enqueue(Request* request, absl::Status received) {
  if (received.ok()) {
    received = CheckReplyFits(request->operation.request, ring_->max_answer_bytes(), "slot");
  }
  if (received.ok()) received = context_->methods->fleet()->Enqueue(&request->operation);
  // Else `request` may be gone already: do not touch it.
  if (!received.ok()) Complete(request, received);
}

void* RingSession::TakeBlock() {
  MutexLock lock(&mutex_);
  if (free_.empty()) return ::operator new(sizeof(Request));
  void* const block = free_.back();
  free_.pop_back();
  return block;
}

void RingSession::Delete(Request* request) {
  const std::shared_ptr<RingSession> session = request->session;
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

void RingSession::Complete(Request* request, const absl::Status& status) {
  AttendOperation& operation = request->operation;
  if (status.ok()) {
    WriteReply(&operation, &request->message);
  } else {
    WriteError(operation.request.request_id, status, ring_->max_answer_bytes(), &request->message);
  }
  {
    MutexLock lock(&mutex_);
    requests_.back()->place = request->place;
    requests_[request->place] = requests_.back();
    requests_.pop_back();
  }
  request->rpc.set_status(status.code());
  request->scope.Replying(status);
  ring_->Answer(request->header.tag, request->message);
  request->scope.Record(operation.identity.name, operation.request.request_id);
  Delete(request);
}

void RingSession::Cancel(uint64_t tag) {
  MutexLock lock(&mutex_);
  for (Request* request : requests_) {
    if (request->header.tag == tag) request->operation.Cancel();
  }
}

void RingSession::End() {
  ended_ = true;
  MutexLock lock(&mutex_);
  for (Request* request : requests_) request->operation.Cancel();
}

}  // namespace flashcore::server
