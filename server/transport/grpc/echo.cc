#include "server/transport/grpc/echo.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "flashcore/v1/debug.pb.h"
#include "proto/grpc/message_view.h"
#include "server/transport/rpc/unknown_fields.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxSmallFieldBytes = 1024;

// calloc's pages are committed on first use: an idle server pays nothing for a large maximum.
grpc::Slice ZeroSlice(size_t bytes) {
  void* memory = std::calloc(std::max<size_t>(bytes, 1), 1);
  return grpc::Slice(memory, bytes, std::free);
}

// A per-thread buffer of at least `bytes`, reused from request to request.
std::byte* WarmBuffer(size_t bytes) {
  thread_local std::vector<std::byte> buffer;
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer.data();
}

}  // namespace

EchoReplier::EchoReplier(size_t max_reply_bytes, const RpcContext* context)
    : context_(context), reply_(ZeroSlice(max_reply_bytes)) {}

absl::StatusOr<grpc::ByteBuffer> EchoReplier::Reply(const grpc::ByteBuffer* request) const {
  if (absl::Status status = CheckMessageBytes(*context_, request->Length()); !status.ok()) {
    ReleaseMessage(request);
    return status;
  }
  wire::LargeField payload{v1::EchoRequest::kPayloadFieldNumber};
  const wire::MessageView message = wire::ViewOf(*request);
  std::string small;
  absl::Status status =
      wire::SplitMessage(message, kMaxSmallFieldBytes, absl::MakeSpan(&payload, 1), &small);
  if (!status.ok()) return status;
  v1::EchoRequest parsed;
  if (!parsed.ParseFromString(small)) return absl::InvalidArgumentError("message: malformed");
  status = CheckKnownFields(parsed);
  if (!status.ok()) return status;
  if (parsed.reply_bytes() > reply_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("reply_bytes: ", parsed.reply_bytes(),
                                                   " is more than the limit of ", reply_.size()));
  }
  wire::CopyField(message, payload, WarmBuffer(payload.size));
  ReleaseMessage(request);
  v1::EchoResponse header;
  header.set_request_id(parsed.request_id());
  const grpc::Slice slices[2] = {
      grpc::Slice(header.SerializeAsString() +
                  wire::FieldHeader(v1::EchoResponse::kPayloadFieldNumber, parsed.reply_bytes())),
      reply_.sub(0, parsed.reply_bytes())};
  return grpc::ByteBuffer(slices, 2);
}

EchoStreamReactor::EchoStreamReactor(const EchoReplier* replier, RpcContext* context,
                                     RpcMetrics* rpc, StreamSet* set, int max_inflight,
                                     grpc::ServerContextBase* call)
    : StreamReactor(set, context, rpc, call),
      replier_(replier),
      max_inflight_(static_cast<size_t>(max_inflight)) {
  Begin();
}

void EchoStreamReactor::OnReadDone(bool ok) {
  {
    MutexLock lock(&mutex_);
    reading_ = false;
    // Not ok: the client has half-closed, or is gone.
    if (!ok && !end_.has_value()) end_ = absl::OkStatus();
    if (absl::Status status = context_->unsent.Check(identity_.name); !end_ && !status.ok()) {
      end_ = status;  // the client does not read: its answers would pile up
    }
    answering_ = !end_.has_value();
    if (!answering_) {
      Advance();
      return;
    }
  }
  auto answer = std::make_unique<Answer>(context_, rpc_, call_, connection());
  absl::StatusOr<grpc::ByteBuffer> reply = replier_->Reply(&incoming_);
  answer->scope.Replying(reply.status());
  MutexLock lock(&mutex_);
  answering_ = false;
  if (reply.ok()) {
    answer->message = *std::move(reply);
    answer->unsent.Ready(identity_.name, kAnswerBytes);  // the payload is shared by all replies
    answers_.push_back(std::move(answer));
  } else {
    answer->scope.Record(identity_.name, "");
    if (!end_.has_value()) end_ = reply.status();
  }
  Advance();
}

void EchoStreamReactor::Advance() {
  if (finished_) return;
  while (cancelled_ && !writing_ && !answers_.empty()) EndAnswer(/*sent=*/false);
  if (!writing_ && !answers_.empty()) {
    writing_ = true;
    StartWrite(&answers_.front()->message);
  }
  if (!end_.has_value() && !reading_ && !answering_ && answers_.size() < max_inflight_) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (end_.has_value() && !answering_ && answers_.empty()) End(*end_);
}

void EchoStreamReactor::EndAnswer(bool sent) {
  Answer& answer = *answers_.front();
  const CutOff cut_off = answer.unsent.Sent();
  if (!sent) answer.scope.Lost(cut_off);
  answer.scope.Record(identity_.name, "");
  answers_.pop_front();
}

void EchoStreamReactor::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  writing_ = false;
  EndAnswer(ok);
  Advance();
}

}  // namespace flashcore::server
