#include "server/transport/local/calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/frames.h"
#include "server/base/error_info.h"
#include "server/transport/rpc/load_chunks.h"
#include "server/transport/rpc/message.h"

namespace flashcore::server::local {
namespace {

// A frame has this much more than the message of its reply, at most.
constexpr size_t kFrameOverhead = 64;

// What a call takes beside its message, more or less.
constexpr size_t kCallBytes = 1024;

class AttendCall final : public TensorCall {
 public:
  AttendCall(const CallSetup& setup, std::string message, Reply reply)
      : TensorCall(setup, setup.services->attend, std::move(message), std::move(reply)) {}

 private:
  absl::Status Parse() override {
    return ParseSingleAttend(message_, setup_.regions.get(), &operation_, &tensors_);
  }
  void Received(const absl::Status& status) override {
    const size_t room = wire::kMaxFrameBytes - kFrameOverhead;
    Exchange::Received(status.ok() ? CheckReplyFits(operation_.request, room, "frame") : status);
  }
  absl::StatusOr<std::string> Encode() override {
    std::string reply;
    WriteReply(&operation_, &reply);
    return reply;
  }
};

class LoadCall final : public TensorCall {
 public:
  LoadCall(const CallSetup& setup, std::string message, Reply reply)
      : TensorCall(setup, setup.services->load_sequence, std::move(message), std::move(reply)),
        chunks_(origin_.fleet, setup.regions.get(), setup.identity) {}

 private:
  absl::Status Parse() override { return chunks_.Parse(message_, &operation_, &tensors_); }
  absl::StatusOr<std::string> Encode() override {
    v1::LoadSequenceResponse response;
    const absl::Status status = chunks_.Finish(&response);
    if (!status.ok()) return status;
    return response.SerializeAsString();
  }

  LoadChunks chunks_;
};

// Why a call is not run although it has its turn; OK: it is.
absl::Status CheckInTime(const CallSetup& setup, bool cancelled) {
  if (cancelled) return absl::CancelledError("the client cancelled the call");
  return CheckDeadline(*setup.services->methods->context(), setup.deadline);
}

// OK if the call may run, and parses its message.
absl::Status AdmitAndParse(const RpcContext& context, const Identity& caller,
                           const absl::Status& refused, absl::string_view bytes,
                           google::protobuf::Message* request) {
  absl::Status status = refused.ok() ? Admit(context, caller) : refused;
  if (status.ok() && !request->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    status = absl::InvalidArgumentError("message: not well-formed protobuf");
  }
  return status;
}

// Runs `body`, which fills in the response, on the message `bytes`, unless the call is `refused`;
// `*out` is the serialized response.
template <typename Request, typename Response, typename Body>
absl::Status RunCall(RpcContext* context, RpcMetrics* rpc, const absl::Status& refused,
                     const Identity& caller, absl::string_view bytes, const Body& body,
                     std::string* out) {
  RpcScope rpc_scope(context, rpc);
  RequestScope scope(context, rpc);
  Request request;
  Response response;
  absl::Status status = AdmitAndParse(*context, caller, refused, bytes, &request);
  if (status.ok()) status = body(request, &response);
  if (status.ok()) response.SerializeToString(out);
  rpc_scope.set_status(status.code());
  scope.Replying(status);
  scope.Record(caller.name, "");
  return status;
}

}  // namespace

absl::Status CheckDeadline(const RpcContext& context, TimePoint deadline) {
  if (deadline == kNoDeadline || context.clock->Now() < deadline) return absl::OkStatus();
  return absl::DeadlineExceededError("the deadline passed before the call had its turn");
}

PendingCall::PendingCall(const CallSetup& setup, size_t bytes, Reply reply)
    : setup_(setup),
      charge_(setup.services->room, setup.identity.name, kCallBytes + bytes),
      reply_(std::move(reply)) {}

void PendingCall::Answer(std::shared_ptr<PendingCall> self, absl::StatusOr<std::string> message) {
  Reply reply = std::move(reply_);  // which may destroy this
  reply(std::move(self), std::move(message));
}

void UnaryCall::Start() {
  std::string response;
  const absl::Status status =
      (*run_)(CheckInTime(setup_, cancelled_), setup_.identity, message_, &response);
  if (status.ok()) {
    Answer(shared_from_this(), std::move(response));
  } else {
    Answer(shared_from_this(), status);
  }
}

ManageCall::ManageCall(const CallSetup& setup, std::string message, Reply reply)
    : PendingCall(setup, message.size(), std::move(reply)),
      message_(std::move(message)),
      operations_(setup.services->methods, &request_, &response_) {}

void ManageCall::Start() {
  RpcContext* const context = setup_.services->methods->context();
  rpc_.emplace(context, setup_.services->manage_sequences);
  scope_.emplace(context, setup_.services->manage_sequences);
  const absl::Status status = Begin();
  if (!status.ok() || operations_.done()) return Finish(status);
  RunNext();
}

absl::Status ManageCall::Begin() {
  absl::Status status = AdmitAndParse(*setup_.services->methods->context(), setup_.identity,
                                      CheckInTime(setup_, cancelled_), message_, &request_);
  if (status.ok()) status = CheckKnownFields(request_);
  return status.ok() ? operations_.Begin() : status;
}

void ManageCall::RunNext() {
  operations_.RunNext(setup_.identity);
  if (operations_.done()) return Finish(absl::OkStatus());
  setup_.services->long_calls->Add(setup_.identity.name,
                                   [self = shared_from_this()] { self->RunNext(); });
}

void ManageCall::Finish(const absl::Status& status) {
  rpc_->set_status(status.code());
  scope_->Replying(status);
  scope_->Record(setup_.identity.name, "");
  rpc_.reset();
  Answer(shared_from_this(),
         status.ok() ? absl::StatusOr<std::string>(response_.SerializeAsString()) : status);
}

std::shared_ptr<TensorCall> TensorCall::Make(const CallSetup& setup, const std::string& method,
                                             std::string message, Reply reply) {
  if (method == "Attend") {
    return std::make_shared<AttendCall>(setup, std::move(message), std::move(reply));
  }
  if (method == "LoadSequence") {
    return std::make_shared<LoadCall>(setup, std::move(message), std::move(reply));
  }
  return nullptr;
}

TensorCall::TensorCall(const CallSetup& setup, const Exchange::Origin& origin, std::string message,
                       Reply reply)
    : UseCount::Use(setup.services->uses),
      PendingCall(setup, message.size(), std::move(reply)),
      Exchange(origin, std::move(message)),
      rpc_(origin.context, origin.rpc) {
  operation_.identity = setup.identity;
  operation_.deadline = setup.deadline;
}

void TensorCall::Start() {
  self_ = shared_from_this();
  Receive(Parse());
}

void TensorCall::Complete(const absl::Status& status) {
  absl::StatusOr<std::string> reply = status.ok() ? Encode() : status;
  rpc_.set_status(reply.status().code());
  scope_.Replying(reply.status());
  Record();
  Answer(std::move(self_), std::move(reply));
}

UnaryCalls::UnaryCalls(AttentionMethods* methods)
    : methods_(methods), hold_lease_(methods->Rpc("HoldLease", "local")) {
  AttentionMethods::ForEach([this](const char* name, auto method) { Add(name, method); });
}

template <typename Request, typename Response>
void UnaryCalls::Add(const char* name, AttentionMethods::Method<Request, Response> method) {
  runs_[name] = [methods = methods_, rpc = methods_->Rpc(name, "local"), method](
                    const absl::Status& refused, const Identity& caller, absl::string_view bytes,
                    std::string* out) {
    const auto body = [&](const Request& request, Response* response) {
      return methods->Run(method, caller, request, response);
    };
    return RunCall<Request, Response>(methods->context(), rpc, refused, caller, bytes, body, out);
  };
}

absl::Status UnaryCalls::HoldLease(const Identity& caller, absl::string_view request,
                                   ClientLease* lease, std::string* response) const {
  const auto body = [&](const v1::HoldLeaseRequest& message, v1::HoldLeaseResponse* reply) {
    if (absl::Status status = CheckKnownFields(message); !status.ok()) return status;
    if (!lease->open()) *lease = methods_->fleet()->OpenLease(caller);
    reply->set_lease_id(lease->id().ToBytes());
    return absl::OkStatus();
  };
  return RunCall<v1::HoldLeaseRequest, v1::HoldLeaseResponse>(
      methods_->context(), hold_lease_, absl::OkStatus(), caller, request, body, response);
}

const UnaryCalls::Run* UnaryCalls::Find(const std::string& method) const {
  const auto found = runs_.find(method);
  return found == runs_.end() ? nullptr : &found->second;
}

}  // namespace flashcore::server::local
