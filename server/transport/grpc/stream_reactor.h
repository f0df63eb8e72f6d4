// State that the streaming RPCs share, so that a drain can end them.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_STREAM_REACTOR_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_STREAM_REACTOR_H_

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/error_info.h"
#include "server/base/mutex.h"
#include "server/request/identity.h"
#include "server/transport/grpc/unary_reactor.h"
#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

// A stream that takes requests from its client.
class RequestStream {
 public:
  virtual ~RequestStream() = default;

  // Takes no more requests: the stream ends with `status` once its requests are answered. Only the
  // first call has an effect.
  virtual void StopReading(const absl::Status& status) = 0;
  virtual const Identity& identity() const = 0;
};

// The open streams. Thread-safe.
class StreamSet {
 public:
  void Add(RequestStream* stream) {
    MutexLock lock(&mutex_);
    streams_.insert(stream);
  }
  // Call it before the stream is deleted. Waits while Drain runs.
  void Remove(RequestStream* stream) {
    MutexLock lock(&mutex_);
    streams_.erase(stream);
  }
  // Stops every stream with UNAVAILABLE.
  void Drain() {
    MutexLock lock(&mutex_);
    for (RequestStream* stream : streams_) {
      stream->StopReading(absl::UnavailableError(kDrains));
    }
  }
  // Stops every stream whose identity is not valid any more.
  void EndRevoked(const Authenticator& authenticator) {
    MutexLock lock(&mutex_);
    for (RequestStream* stream : streams_) {
      const absl::Status status = authenticator.CheckStillValid(stream->identity());
      if (!status.ok()) stream->StopReading(status);
    }
  }

 private:
  Mutex mutex_;
  std::unordered_set<RequestStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

// A reactor of gRPC's callback API that is in a StreamSet while it exists. Deletes itself when the
// RPC has ended. Set, context and metrics outlive it.
template <typename GrpcReactor>
class StreamReactor : public GrpcReactor, public RequestStream {
 public:
  void StopReading(const absl::Status& status) final ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    StopReadingLocked(status);
  }
  const Identity& identity() const final { return identity_; }

  void OnCancel() final ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    CancelRequests();
    // Reading may have ended already, which looks as if the client had half-closed.
    if (!end_.has_value() || end_->ok()) end_ = absl::CancelledError("cancelled by the client");
    Advance();
  }

 protected:
  // A client that is not admitted gets the reason as the stream's status.
  StreamReactor(StreamSet* set, RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call)
      : StreamReactor(set, context, rpc, call, context->client_connections->Find(call->peer())) {}

  // Call it in the constructor of the derived class, when its members are initialized.
  void Begin() ABSL_LOCKS_EXCLUDED(mutex_) {
    set_->Add(this);
    MutexLock lock(&mutex_);
    // Checked after joining the set, so that a drain or a revocation that begins now is not missed.
    absl::Status status = CheckNotDraining(*context_);
    if (status.ok()) status = context_->authenticator.CheckStillValid(identity_);
    if (status.ok()) {
      Advance();
    } else {
      StopReadingLocked(status);
    }
  }

  void StopReadingLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!end_.has_value()) end_ = status;
    Advance();
  }

  // Starts whatever can be started now: a write, a read, or End.
  virtual void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Cancels the requests in the engine.
  virtual void CancelRequests() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {}

  // Ends the RPC; call it once. `reply_bytes` of heap memory are charged until the reply is sent.
  // If a read is still with gRPC, it returns.
  void End(const absl::Status& status, size_t reply_bytes = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    scope_.set_status(status.code());
    last_.Ready(identity_.name, kRpcBytes + reply_bytes);
    this->Finish(ToGrpcStatus(status));
  }

  ClientConnection* connection() const { return scope_.connection(); }

  RpcContext* const context_;
  RpcMetrics* const rpc_;
  grpc::ServerContextBase* const call_;
  const Identity identity_;

 private:
  StreamReactor(StreamSet* set, RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call,
                std::shared_ptr<ClientConnection> connection)
      : StreamReactor(set, context, rpc, call, connection,
                      AdmitClient(context, *call, connection.get())) {}
  StreamReactor(StreamSet* set, RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call,
                std::shared_ptr<ClientConnection> connection,
                const absl::StatusOr<Identity>& client)
      : context_(context),
        rpc_(rpc),
        call_(call),
        identity_(client.value_or(Identity())),
        set_(set),
        end_(client.ok() ? std::nullopt : std::make_optional(client.status())),
        scope_(context, rpc, std::move(connection)),
        last_(&context->unsent, CancelRpc(call, scope_.connection())) {}

  void OnDone() final {
    last_.Sent();
    set_->Remove(this);
    {
      MutexLock lock(&mutex_);  // the caller of Finish may still hold it
      if (cancelled_) scope_.Cancelled();
    }
    delete this;
  }

  StreamSet* const set_;

 protected:
  Mutex mutex_;
  // Set when nothing more will be read: how the stream ends once everything is answered.
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;

 private:
  RpcScope scope_;
  UnsentReply last_;  // what ends the stream
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_STREAM_REACTOR_H_
