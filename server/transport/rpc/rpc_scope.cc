#include "server/transport/rpc/rpc_scope.h"

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

const char* TypeOf(const google::protobuf::MethodDescriptor& method) {
  if (method.client_streaming()) return method.server_streaming() ? "bidi_stream" : "client_stream";
  return method.server_streaming() ? "server_stream" : "unary";
}

}  // namespace

std::vector<RpcMethod> MethodsOf(const google::protobuf::ServiceDescriptor& service) {
  std::vector<RpcMethod> methods;
  for (int i = 0; i < service.method_count(); ++i) {
    const google::protobuf::MethodDescriptor& method = *service.method(i);
    methods.push_back({service.full_name(), method.name(), TypeOf(method)});
  }
  return methods;
}

absl::Status CheckNotDraining(const RpcContext& context) {
  return context.draining.load() ? absl::UnavailableError(kDrains) : absl::OkStatus();
}

absl::Status Admit(const RpcContext& context, const Identity& client) {
  if (absl::Status status = CheckNotDraining(context); !status.ok()) return status;
  return context.unsent.Check(client.name);
}

absl::Status CheckMessageBytes(const RpcContext& context, size_t bytes) {
  if (bytes <= context.max_message_bytes) return absl::OkStatus();
  return WithTooLarge(
      absl::ResourceExhaustedError(absl::StrCat(
          "message: ", bytes, " bytes; at most ", context.max_message_bytes,
          " are allowed (--max_message_bytes); load long K/V with LoadSequence, in chunks")),
      bytes, context.max_message_bytes);
}

RpcScope::RpcScope(RpcContext* context, RpcMetrics* rpc,
                   std::shared_ptr<ClientConnection> connection)
    : context_(context),
      rpc_(rpc),
      call_(std::move(connection), context->clock),
      admitted_(!context->draining.load()) {
  if (rpc_->is_grpc()) rpc_->RecordStart();
  if (admitted_) context_->admitted_rpcs.fetch_add(1);
  context_->last_event.store(context->clock->Now());
}

RpcScope::~RpcScope() {
  if (rpc_->is_grpc()) rpc_->RecordEnd(static_cast<int>(code_));
  context_->last_event.store(context_->clock->Now());
  if (admitted_) context_->admitted_rpcs.fetch_sub(1);
}

RequestScope::RequestScope(RpcContext* context, RpcMetrics* rpc)
    : context_(context), rpc_(rpc), start_(context->clock->Now()), replying_(start_) {
  context_->metrics->inflight_requests.Increment();
}

void RequestScope::Replying(absl::Status status) {
  status_ = std::move(status);
  replying_ = context_->clock->Now();
}

void RequestScope::Lost(CutOff why) {
  if (!status_.ok()) return;
  switch (why) {
    case CutOff::kTimeout:
      unread_ = true;
      status_ = absl::CancelledError("the client did not read the reply within --reply_timeout_s");
      return;
    case CutOff::kShare:
      unread_ = true;
      status_ = absl::CancelledError(
          "the client left too many replies unread (a quarter of --unsent_reply_bytes)");
      return;
    case CutOff::kStaging:
      unread_ = true;
      status_ = absl::CancelledError(
          "the client left more staging memory in unread replies than another client needed");
      return;
    case CutOff::kDrain:
      status_ = absl::UnavailableError(
          absl::StrCat(kDrains, ", and the client did not read the reply in time"));
      return;
    case CutOff::kNo:
      status_ = absl::CancelledError("the client was gone before it had the reply");
      return;
  }
}

void RequestScope::Record(absl::string_view client, absl::string_view request_id,
                          TimePoint deadline) {
  Metrics& metrics = *context_->metrics;
  const TimePoint end = context_->clock->Now();
  const double seconds = Seconds(end - start_);
  const auto duration_us = static_cast<int64_t>(seconds * 1e6);
  if (absl::IsCancelled(status_) && !unread_ && end >= deadline) {
    status_ = absl::DeadlineExceededError(status_.message());
  }
  rpc_->RecordRequest(OutcomeOf(status_), seconds, Seconds(end - replying_));
  metrics.inflight_requests.Decrement();
  if (status_.ok()) {
    if (DefaultLogger().Enabled(LogLevel::kDebug)) {
      LogDebug("request", {{"method", rpc_->method()},
                           {"transport", rpc_->transport()},
                           {"request_id", request_id},
                           {"code", "OK"},
                           {"duration_us", duration_us}});
    }
    return;
  }
  if (unread_) {
    metrics.rejected_unread.Increment();
  } else {
    metrics.CountRejected(status_);
  }
  static LogLimiter limiter(20);
  if (const auto pass = limiter.Admit()) {
    LogWarning("request failed", {{"method", rpc_->method()},
                                  {"transport", rpc_->transport()},
                                  {"client", client},
                                  {"request_id", request_id},
                                  {"code", absl::StatusCodeToString(status_.code())},
                                  {"error", status_.message()},
                                  {"duration_us", duration_us},
                                  {"suppressed", pass.suppressed}});
  }
}

}  // namespace flashcore::server
