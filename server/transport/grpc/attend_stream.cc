#include "server/transport/grpc/attend_stream.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/request/validate.h"
#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/message.h"

namespace flashcore::server {

// Its exchange begins with the message in incoming_; while it waits for staging memory, nothing is
// read. Then it is in inflight_ until it is complete, and in answers_ until the answer is sent.
class AttendStreamReactor::Request final : public Exchange {
 public:
  explicit Request(AttendStreamReactor* stream)
      : Exchange(stream->origin_, ToRequestMessage(&stream->incoming_)),
        stream_(stream),
        unsent_(&stream->context_->unsent, CancelRpc(stream->call_, stream->connection())) {
    operation_.identity = stream->identity_;
    operation_.deadline = stream->deadline_;
  }

  // With `refusal` if that is not OK.
  void Start(const absl::Status& refusal) {
    bool well_formed = false;
    const wire::MessageView message = message_.view();
    absl::Status status =
        ParseAttend(message, /*regions=*/nullptr, &operation_, &tensors_, &well_formed);
    if (well_formed) {
      status.Update(CheckMessageBytes(*stream_->context_, message.size()));
      status.Update(TakeId());
      if (!refusal.ok()) status = refusal;
    }
    if (const uint64_t timeout_ns = operation_.request.timeout_ns; timeout_ns > 0) {
      operation_.deadline =
          std::min(operation_.deadline, DeadlineIn(timeout_ns, origin_.fleet->clock()));
    }
    // After a malformed message, nothing on the stream can be trusted.
    if (!well_formed) stream_->StopReading(status);
    Receive(status);
  }

  absl::string_view request_id() const { return operation_.request.request_id; }
  grpc::ByteBuffer* answer() { return &answer_; }
  // gRPC has `sent` the answer, or dropped it.
  void End(bool sent) {
    const CutOff cut_off = unsent_.Sent();
    if (!sent) scope_.Lost(cut_off);
    Record();
  }

 private:
  // Until this is complete, its request_id is that of no other. Leaves none if it cannot have it.
  absl::Status TakeId() {
    std::string& id = operation_.request.request_id;
    if (id.empty()) return absl::InvalidArgumentError("request_id: empty; AttendStream needs one");
    if (id.size() > kMaxRequestIdBytes || stream_->TakeId(id)) return absl::OkStatus();
    absl::Status status = absl::InvalidArgumentError(
        absl::StrCat("request_id: '", id, "' is that of a request in flight on this stream"));
    id.clear();
    return status;
  }
  void Received(const absl::Status& status) override {
    AttendStreamReactor* const stream = stream_;
    Exchange::Received(status);  // `this` may be gone then
    stream->EndReceiving();
  }
  void Complete(const absl::Status& status) override {
    const StagingUse staging = operation_.tensors.staged_results();
    answer_ = status.ok() ? ToByteBuffer(EncodeReply(&operation_))
                          : ToByteBuffer(EncodeError(operation_.request.request_id, status));
    scope_.Replying(status);
    const size_t staged_bytes = status.ok() ? StagedReplyBytes(operation_) : 0;
    unsent_.Ready(operation_.identity.name, kAnswerBytes + answer_.Length() - staged_bytes,
                  staging);
    stream_->AddAnswer(this);
  }

  AttendStreamReactor* const stream_;
  grpc::ByteBuffer answer_;
  UnsentReply unsent_;
};

AttendStreamReactor::AttendStreamReactor(const Exchange::Origin& origin, StreamSet* set,
                                         int max_inflight, grpc::ServerContextBase* call,
                                         TimePoint deadline)
    : StreamReactor(set, origin.context, origin.rpc, call),
      origin_(origin),
      max_inflight_(static_cast<size_t>(max_inflight)),
      deadline_(deadline) {
  Begin();
}

AttendStreamReactor::~AttendStreamReactor() = default;

void AttendStreamReactor::OnReadDone(bool ok) {
  Request* request = nullptr;
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    reading_ = false;
    half_closed_ = !ok;  // or the client is gone
    if (!ok && !end_.has_value()) end_ = absl::OkStatus();
    if (!ok || (end_.has_value() && !Refuses())) {
      Advance();
      return;
    }
    if (!end_.has_value()) {
      refusal = context_->unsent.Check(identity_.name);
      if (!refusal.ok()) end_ = refusal;  // the client does not read: its answers would pile up
    } else {
      refusal = *end_;
    }
    receiving_ = true;
    auto owned = std::make_unique<Request>(this);
    request = owned.get();
    inflight_.emplace(request, std::move(owned));
  }
  request->Start(refusal);
}

bool AttendStreamReactor::TakeId(absl::string_view request_id) {
  MutexLock lock(&mutex_);
  return ids_.insert(request_id).second;
}

void AttendStreamReactor::EndReceiving() {
  MutexLock lock(&mutex_);
  receiving_ = false;
  Advance();
}

void AttendStreamReactor::AddAnswer(Request* request) {
  MutexLock lock(&mutex_);
  ids_.erase(request->request_id());
  auto entry = inflight_.find(request);
  answers_.push_back(std::move(entry->second));
  inflight_.erase(entry);
  Advance();
}

void AttendStreamReactor::Advance() {
  if (finished_) return;
  while (cancelled_ && !writing_ && !answers_.empty()) EndAnswer(/*sent=*/false);
  if (!writing_ && !answers_.empty()) {
    writing_ = true;
    StartWrite(answers_.front()->answer());
  }
  const size_t unanswered = inflight_.size() + answers_.size();
  const bool reads = !end_.has_value() || (Refuses() && !half_closed_ && !inflight_.empty());
  if (reads && !reading_ && !receiving_ && unanswered < max_inflight_) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (end_.has_value() && !receiving_ && unanswered == 0) End(*end_);
}

void AttendStreamReactor::EndAnswer(bool sent) {
  answers_.front()->End(sent);
  answers_.pop_front();
}

void AttendStreamReactor::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  writing_ = false;
  EndAnswer(ok);
  Advance();
}

void AttendStreamReactor::CancelRequests() {
  for (auto& [request, owned] : inflight_) request->Cancel();
}

}  // namespace flashcore::server
