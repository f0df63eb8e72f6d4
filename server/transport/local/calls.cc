#include "server/transport/local/calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/local_ring.h"
#include "server/transport/local/connection.h"
#include "server/transport/message.h"

namespace flashcore::server {
namespace {

// A frame has this much more than the message of its reply, at most.
constexpr size_t kFrameOverhead = 64;

// One request of a call, in the engine.
struct CallRequest {
  CallRequest(const CallSetup& setup, RpcMetrics* rpc, std::string its_message)
      : message(std::move(its_message)),
        receiver(setup.context->methods->fleet(), rpc, message, &operation),
        scope(setup.context->methods->context(), rpc) {
    operation.identity = setup.identity;
    operation.deadline = setup.deadline;
  }
  wire::MessageView view() const { return wire::MessageView(message); }
  void End(const absl::Status& status) {
    scope.Replying(status);
    scope.Record(operation.identity.name, operation.request.request_id);
  }

  std::string message;
  AttendOperation operation;
  TensorReceiver receiver;
  RequestScope scope;
};

class AttendCall final : public PendingCall, public std::enable_shared_from_this<AttendCall> {
 public:
  AttendCall(const CallSetup& setup, Reply reply)
      : use_(&setup.context->uses),
        setup_(setup),
        rpc_(setup.context->methods->context(), setup.context->attend),
        reply_(std::move(reply)) {}

  void AddMessage(std::string message, bool /*more*/) override {
    if (request_ != nullptr) return;
    request_ = std::make_unique<CallRequest>(setup_, setup_.context->attend, std::move(message));
    bool well_formed = false;
    const absl::Status status =
        ParseAttend(request_->view(), setup_.regions.get(), &request_->operation,
                    &request_->receiver.tensors, &well_formed);
    request_->operation.done = [self = shared_from_this()](const absl::Status& result) {
      self->Complete(result);
    };
    request_->receiver.Receive(status, [self = shared_from_this()](const absl::Status& received) {
      self->Enqueue(received);
    });
  }
  void Cancel() override { request_->operation.Cancel(); }

 private:
  void Enqueue(absl::Status received) {
    AttendOperation& operation = request_->operation;
    if (received.ok()) {
      received = CheckReplyFits(operation.request, local::kMaxFrameBytes - kFrameOverhead, "frame");
    }
    if (received.ok()) received = setup_.context->methods->fleet()->Enqueue(&operation);
    if (received.ok()) return;
    operation.done = nullptr;  // it keeps this alive
    Complete(received);
  }
  // On a lane's thread, or on that of whoever refuses the request.
  void Complete(const absl::Status& status) {
    std::string message;
    if (status.ok()) WriteReply(&request_->operation, &message);
    rpc_.set_status(status.code());
    request_->End(status);
    setup_.context->post(setup_.connection,
                         [self = shared_from_this(), status, message = std::move(message)](
                             Connection*) mutable { self->reply_(status, std::move(message)); });
  }

  const UseCount::Use use_;  // first: what the others hold is released within it
  const CallSetup setup_;
  RpcScope rpc_;
  Reply reply_;
  std::unique_ptr<CallRequest> request_;
};

class LoadCall final : public PendingCall, public std::enable_shared_from_this<LoadCall> {
 public:
  LoadCall(const CallSetup& setup, Reply reply)
      : use_(&setup.context->uses),
        setup_(setup),
        rpc_(setup.context->methods->context(), setup.context->load_sequence),
        chunks_(setup.context->methods->fleet(), setup.regions.get(), setup.identity),
        reply_(std::move(reply)) {}

  void AddMessage(std::string message, bool more) override {
    if (!more_ || ended_) return;  // the client has not seen the reply yet
    more_ = more;
    waiting_.push_back(std::move(message));
    StartNext();
  }
  bool TakesMore() const override { return ended_ || waiting_.empty(); }
  void Cancel() override {
    cancelled_ = true;
    if (running_ != nullptr) running_->operation.Cancel();
    if (running_ == nullptr) End(absl::CancelledError("cancelled by the client"));
  }

 private:
  void StartNext() {
    if (running_ != nullptr || ended_) return;
    if (waiting_.empty()) {
      if (!more_) Finish();
      return;
    }
    running_ = std::make_unique<CallRequest>(setup_, setup_.context->load_sequence,
                                             std::move(waiting_.front()));
    waiting_.pop_front();
    CallRequest* const chunk = running_.get();
    const absl::Status status =
        chunks_.Parse(chunk->view(), &chunk->operation, &chunk->receiver.tensors);
    chunk->operation.done = [self = shared_from_this()](const absl::Status& result) {
      self->PostCompleted(result);
    };
    chunk->receiver.Receive(status, [self = shared_from_this(), chunk](absl::Status received) {
      Fleet* const fleet = self->setup_.context->methods->fleet();
      if (received.ok()) received = fleet->Enqueue(&chunk->operation);
      if (received.ok()) return;
      chunk->operation.done = nullptr;  // it keeps the call alive
      self->PostCompleted(received);
    });
  }
  // On a lane's thread, or on that of whoever refuses the chunk.
  void PostCompleted(const absl::Status& status) {
    running_->End(status);
    setup_.context->post(setup_.connection, [self = shared_from_this(), status](Connection*) {
      self->Completed(status);
    });
  }
  void Completed(const absl::Status& status) {
    running_.reset();
    if (!status.ok()) return End(status);
    if (cancelled_) return End(absl::CancelledError("cancelled by the client"));
    StartNext();
  }
  void Finish() {
    v1::LoadSequenceResponse response;
    const absl::Status status = chunks_.Finish(&response);
    End(status, status.ok() ? response.SerializeAsString() : "");
  }
  void End(const absl::Status& status, std::string message = "") {
    if (ended_) return;
    ended_ = true;
    waiting_.clear();
    rpc_.set_status(status.code());
    reply_(status, std::move(message));
  }

  const UseCount::Use use_;  // first: what the others hold is released within it
  const CallSetup setup_;
  RpcScope rpc_;
  LoadChunks chunks_;
  Reply reply_;
  std::deque<std::string> waiting_;
  std::unique_ptr<CallRequest> running_;
  bool more_ = true;
  bool cancelled_ = false;
  bool ended_ = false;
};

}  // namespace

UnaryCalls::UnaryCalls(LocalContext* context) : context_(context) {
  Add("GetServerInfo", &AttentionMethods::GetServerInfo);
  Add("CreateSequence", &AttentionMethods::CreateSequence);
  Add("ForkSequence", &AttentionMethods::ForkSequence);
  Add("TruncateSequence", &AttentionMethods::TruncateSequence);
  Add("DeleteSequence", &AttentionMethods::DeleteSequence);
  Add("GetSequence", &AttentionMethods::GetSequence);
  Add("ListSequences", &AttentionMethods::ListSequences);
}

template <typename Request, typename Response>
void UnaryCalls::Add(const char* name,
                     absl::Status (AttentionMethods::*method)(const Identity&, const Request&,
                                                              Response*) const) {
  methods_[name] = [context = context_, rpc = context_->Rpc(name), method](
                       const Identity& caller, absl::string_view bytes, std::string* out) {
    RpcScope rpc_scope(context->methods->context(), rpc);
    RequestScope scope(context->methods->context(), rpc);
    Request request;
    Response response;
    absl::Status status = AdmitLocal(*context->methods->context(), caller);
    if (status.ok() && !request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      status = absl::InvalidArgumentError("message: not well-formed protobuf");
    }
    if (status.ok()) status = (context->methods->*method)(caller, request, &response);
    if (status.ok()) response.SerializeToString(out);
    rpc_scope.set_status(status.code());
    scope.Replying(status);
    scope.Record(caller.name, "");
    return status;
  };
}

const UnaryCalls::Run* UnaryCalls::Find(const std::string& method) const {
  const auto found = methods_.find(method);
  return found == methods_.end() ? nullptr : &found->second;
}

std::shared_ptr<PendingCall> MakeAttend(const CallSetup& setup, PendingCall::Reply reply) {
  return std::make_shared<AttendCall>(setup, std::move(reply));
}

std::shared_ptr<PendingCall> MakeLoad(const CallSetup& setup, PendingCall::Reply reply) {
  return std::make_shared<LoadCall>(setup, std::move(reply));
}

}  // namespace flashcore::server
