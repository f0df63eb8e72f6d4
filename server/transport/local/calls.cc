#include "server/transport/local/calls.h"

#include <atomic>
#include <optional>
#include <utility>

#include "flashcore/v1/attention.pb.h"
#include "proto/wire/frames.h"
#include "server/transport/rpc/exchange.h"
#include "server/transport/rpc/load_chunks.h"
#include "server/transport/rpc/message.h"

namespace flashcore::server::local {
namespace {

// A frame has this much more than the message of its reply, at most.
constexpr size_t kFrameOverhead = 64;

// The memory of a call beside its message, more or less.
constexpr size_t kCallBytes = 1024;

using Run = decltype(MethodTable::Method::run);

// Why a call is not run although it has its turn; OK: it is.
absl::Status CheckInTime(const CallSetup& setup, bool cancelled) {
  if (cancelled) return absl::CancelledError("the client cancelled the call");
  return CheckDeadline(*setup.services->methods->context(), setup.deadline);
}

// OK if the call may run, and parses its message.
absl::Status AdmitAndParse(const RpcContext& context, const Identity& client,
                           const absl::Status& refused, absl::string_view bytes,
                           google::protobuf::Message* request) {
  absl::Status status = refused.ok() ? Admit(context, client) : refused;
  if (status.ok() && !request->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    status = absl::InvalidArgumentError("message: not well-formed protobuf");
  }
  return status;
}

// Runs `body`, which fills in the response, on the message `bytes`, unless the call is `refused`;
// `*out` is the serialized response.
template <typename Request, typename Response, typename Body>
absl::Status RunCall(RpcContext* context, RpcMetrics* rpc, const absl::Status& refused,
                     const Identity& client, absl::string_view bytes, const Body& body,
                     std::string* out) {
  RpcScope rpc_scope(context, rpc);
  RequestScope scope(context, rpc);
  Request request;
  Response response;
  absl::Status status = AdmitAndParse(*context, client, refused, bytes, &request);
  if (status.ok()) status = body(request, &response);
  if (status.ok()) response.SerializeToString(out);
  rpc_scope.set_status(status.code());
  scope.Replying(status);
  scope.Record(client.name, "");
  return status;
}

// A call of `run`, which outlives it.
class UnaryCall final : public PendingCall {
 public:
  UnaryCall(const CallSetup& setup, const Run& run, std::string message, Reply reply)
      : PendingCall(setup, message.size(), std::move(reply)),
        run_(run),
        message_(std::move(message)) {}

  void Start() override {
    std::string response;
    const absl::Status status =
        run_(CheckInTime(setup_, cancelled_), setup_.identity, message_, &response);
    Answer(status.ok() ? absl::StatusOr<std::string>(std::move(response)) : status);
  }
  void Cancel() override { cancelled_ = true; }

 private:
  const Run& run_;
  const std::string message_;
  std::atomic<bool> cancelled_{false};
};

// ManageSequences: one operation in each turn, since one may take milliseconds and there may be
// many. Its client's other calls come in between, too. A call that has begun runs to its end.
class ManageCall final : public PendingCall {
 public:
  ManageCall(const CallSetup& setup, RpcMetrics* rpc, std::string message, Reply reply)
      : PendingCall(setup, message.size(), std::move(reply)),
        metrics_(rpc),
        message_(std::move(message)),
        operations_(setup.services->methods, &request_, &response_) {}

  void Start() override {
    RpcContext* const context = setup_.services->methods->context();
    rpc_.emplace(context, metrics_);
    scope_.emplace(context, metrics_);
    const absl::Status status = Begin();
    if (!status.ok() || operations_.done()) return Finish(status);
    RunNext();
  }
  void Cancel() override { cancelled_ = true; }

 private:
  absl::Status Begin() {
    absl::Status status = AdmitAndParse(*setup_.services->methods->context(), setup_.identity,
                                        CheckInTime(setup_, cancelled_), message_, &request_);
    if (status.ok()) status = CheckKnownFields(request_);
    return status.ok() ? operations_.Begin() : status;
  }
  // Lets the rest have its turn.
  void RunNext() {
    operations_.RunNext(setup_.identity);
    if (operations_.done()) return Finish(absl::OkStatus());
    setup_.services->long_calls->Add(setup_.identity.name,
                                     [this, self = shared_from_this()] { RunNext(); });
  }
  void Finish(const absl::Status& status) {
    rpc_->set_status(status.code());
    scope_->Replying(status);
    scope_->Record(setup_.identity.name, "");
    rpc_.reset();
    Answer(status.ok() ? absl::StatusOr<std::string>(response_.SerializeAsString()) : status);
  }

  RpcMetrics* const metrics_;
  const std::string message_;
  std::atomic<bool> cancelled_{false};
  std::optional<RpcScope> rpc_;
  std::optional<RequestScope> scope_;
  v1::ManageSequencesRequest request_;
  v1::ManageSequencesResponse response_;
  AttentionMethods::Operations operations_;
};

// The tensors of a call.
class CallExchange : public Exchange {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<std::string> reply)>;

  void Start(Done done) {
    done_ = std::move(done);
    Receive(Parse());
  }

 protected:
  CallExchange(const CallSetup& setup, RpcMetrics* rpc, std::string message)
      : Exchange({setup.services->methods->fleet(), setup.services->methods->context(), rpc},
                 RequestMessage(std::move(message))),
        rpc_(origin_.context, rpc) {
    operation_.identity = setup.identity;
    operation_.deadline = setup.deadline;
    owner_ = setup.regions;
  }

 private:
  virtual absl::Status Parse() = 0;
  // The serialized reply of a call that is complete.
  virtual absl::StatusOr<std::string> Encode() = 0;

  void Complete(const absl::Status& status) final {
    absl::StatusOr<std::string> reply = status.ok() ? Encode() : status;
    rpc_.set_status(reply.status().code());
    scope_.Replying(reply.status());
    Record();
    std::exchange(done_, nullptr)(std::move(reply));  // may be the end of this
  }

  RpcScope rpc_;
  Done done_;
};

class AttendExchange final : public CallExchange {
 public:
  AttendExchange(const CallSetup& setup, RpcMetrics* rpc, std::string message)
      : CallExchange(setup, rpc, std::move(message)), regions_(*setup.regions) {}

 private:
  absl::Status Parse() override {
    return ParseSingleAttend(message_.view(), &regions_, &operation_, &tensors_);
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

  const Regions& regions_;
};

// LoadSequence with one chunk.
class LoadExchange final : public CallExchange {
 public:
  LoadExchange(const CallSetup& setup, RpcMetrics* rpc, std::string message)
      : CallExchange(setup, rpc, std::move(message)),
        chunks_(origin_.fleet, setup.regions.get(), setup.identity) {}

 private:
  absl::Status Parse() override { return chunks_.Parse(message_.view(), &operation_, &tensors_); }
  absl::StatusOr<std::string> Encode() override {
    v1::LoadSequenceResponse response;
    const absl::Status status = chunks_.Finish(&response);
    if (!status.ok()) return status;
    return response.SerializeAsString();
  }

  LoadChunks chunks_;
};

// A call with tensors, which `Tensors` carries. Kept alive by itself, too, from Start until it is
// complete.
template <typename Tensors>
class TensorCall final : public PendingCall {
 public:
  TensorCall(const CallSetup& setup, RpcMetrics* rpc, std::string message, Reply reply)
      : PendingCall(setup, message.size(), std::move(reply)),
        tensors_(setup_, rpc, std::move(message)) {}

  void Start() override {
    tensors_.Start([self = shared_from_this()](absl::StatusOr<std::string> reply) {
      self->Answer(std::move(reply));
    });
  }
  void Cancel() override { tensors_.Cancel(); }

 private:
  Tensors tensors_;
};

}  // namespace

absl::Status CheckDeadline(const RpcContext& context, TimePoint deadline) {
  if (deadline == kNoDeadline || context.clock->Now() < deadline) return absl::OkStatus();
  return absl::DeadlineExceededError("the deadline passed before the call had its turn");
}

PendingCall::PendingCall(const CallSetup& setup, size_t bytes, Reply reply)
    : use_(setup.services->uses),
      setup_(setup),
      charge_(setup.services->room, setup.identity.name, kCallBytes + bytes),
      reply_(std::move(reply)) {}

void PendingCall::Answer(absl::StatusOr<std::string> message) {
  reply_(shared_from_this(), std::move(message));
}

MethodTable::MethodTable(AttentionMethods* methods)
    : methods_(methods), hold_lease_(methods->Rpc("HoldLease", "local")) {
  AttentionMethods::ForEach([this](const char* name, AttentionMethods::Kind kind, auto method) {
    Add(name, kind, method);
  });
  AddTensors<AttendExchange>("Attend");
  AddTensors<LoadExchange>("LoadSequence");
  table_["HoldLease"].kind = AttentionMethods::Kind::kLease;
}

template <typename Request, typename Response>
void MethodTable::Add(const char* name, AttentionMethods::Kind kind,
                      AttentionMethods::Method<Request, Response> method) {
  RpcMetrics* const rpc = methods_->Rpc(name, "local");
  Method& added = table_[name];
  added.kind = kind;
  added.run = [methods = methods_, rpc, method](const absl::Status& refused, const Identity& client,
                                                absl::string_view bytes, std::string* out) {
    const auto body = [&](const Request& request, Response* response) {
      return methods->Run(method, client, request, response);
    };
    return RunCall<Request, Response>(methods->context(), rpc, refused, client, bytes, body, out);
  };
  if (kind == AttentionMethods::Kind::kSteps) {
    added.make = [rpc](const CallSetup& setup, std::string message, PendingCall::Reply reply) {
      return std::make_shared<ManageCall>(setup, rpc, std::move(message), std::move(reply));
    };
  } else {
    added.make = [&run = added.run](const CallSetup& setup, std::string message,
                                    PendingCall::Reply reply) {
      return std::make_shared<UnaryCall>(setup, run, std::move(message), std::move(reply));
    };
  }
}

template <typename Tensors>
void MethodTable::AddTensors(const char* name) {
  const auto make = [rpc = methods_->Rpc(name, "local")](
                        const CallSetup& setup, std::string message, PendingCall::Reply reply) {
    return std::make_shared<TensorCall<Tensors>>(setup, rpc, std::move(message), std::move(reply));
  };
  table_[name] = {AttentionMethods::Kind::kTensors, nullptr, make};
}

absl::Status MethodTable::HoldLease(const Identity& client, absl::string_view request,
                                    ClientLease* lease, std::string* response) const {
  const auto body = [&](const v1::HoldLeaseRequest& message, v1::HoldLeaseResponse* reply) {
    if (absl::Status status = CheckKnownFields(message); !status.ok()) return status;
    if (!lease->open()) *lease = methods_->fleet()->OpenLease(client);
    reply->set_lease_id(lease->id().ToBytes());
    return absl::OkStatus();
  };
  return RunCall<v1::HoldLeaseRequest, v1::HoldLeaseResponse>(
      methods_->context(), hold_lease_, absl::OkStatus(), client, request, body, response);
}

const MethodTable::Method* MethodTable::Find(const std::string& method) const {
  const auto found = table_.find(method);
  return found == table_.end() ? nullptr : &found->second;
}

}  // namespace flashcore::server::local
