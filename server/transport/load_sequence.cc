#include "server/transport/load_sequence.h"

#include <utility>

#include "server/transport/convert.h"
#include "server/transport/message.h"

namespace flashcore::server {

LoadSequenceReactor::LoadSequenceReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc,
                                         StreamSet* set, grpc::ServerContextBase* call,
                                         TimePoint deadline, grpc::ByteBuffer* response)
    : StreamReactor(set, context, rpc, call),
      fleet_(fleet),
      deadline_(deadline),
      response_(response) {
  Begin();
}

void LoadSequenceReactor::OnReadDone(bool ok) {
  Chunk* chunk = nullptr;
  {
    MutexLock lock(&mutex_);
    reading_ = false;
    if (!ok && !end_.has_value()) end_ = absl::OkStatus();
    if (end_.has_value()) {
      Advance();
      return;
    }
    receiving_ = std::make_unique<Chunk>(fleet_, context_, rpc_, &incoming_);
    chunk = receiving_.get();
  }
  chunk->receiver.Receive(Parse(chunk), [this](const absl::Status& status) { Received(status); });
}

absl::Status LoadSequenceReactor::Parse(Chunk* chunk) {
  TensorFields& tensors = chunk->receiver.tensors;
  tensors[kKey].number = v1::LoadSequenceRequest::kKeyFieldNumber;
  tensors[kValue].number = v1::LoadSequenceRequest::kValueFieldNumber;
  v1::LoadSequenceRequest message;
  absl::Status status = ParseMessage(incoming_, absl::MakeSpan(tensors), &message);
  AttendOperation& operation = chunk->operation;
  if (status.ok()) status = ToRequest(message, &operation.request);
  operation.request.key_bytes = tensors[kKey].size;
  operation.request.value_bytes = tensors[kValue].size;
  operation.identity = identity_;
  operation.deadline = deadline_;
  operation.done = [this](const absl::Status& result) { Complete(result); };
  return status;
}

void LoadSequenceReactor::Received(const absl::Status& status) {
  Chunk* next = nullptr;
  {
    MutexLock lock(&mutex_);
    if (status.ok()) {
      received_ = std::move(receiving_);
    } else {
      receiving_->End(status);
      receiving_.reset();
      if (!end_.has_value()) end_ = status;
    }
    next = StartNext();
    Advance();
  }
  if (next != nullptr) Enqueue(next);
}

absl::Status LoadSequenceReactor::ToRequest(const v1::LoadSequenceRequest& message,
                                            AttendRequest* request) {
  if (!sequence_.has_value()) {
    absl::StatusOr<SequenceId> id = ToSequenceId(message.sequence_id());
    if (!id.ok()) return id.status();
    absl::StatusOr<SequenceInfo> info = fleet_->EngineOf(*id).sequences().Get(*id, identity_);
    if (!info.ok()) return info.status();
    sequence_ = *id;
    shape_ = info->shape;
  } else if (!message.sequence_id().empty()) {
    return absl::InvalidArgumentError(
        "sequence_id: is set, but this is not the first message of the stream");
  }
  if (message.rows() == 0) return absl::InvalidArgumentError("rows: 0; at least 1 is needed");
  request->append_only = true;
  request->layer = message.layer();
  request->dtype = shape_.dtype;
  request->num_heads = request->num_kv_heads = shape_.num_kv_heads;
  request->head_dim = shape_.head_dim;
  SpanShape& span = request->spans.emplace_back();
  span.kv_rows = message.rows();
  span.sequence_id = sequence_->ToBytes();
  if (message.has_expected_length()) span.expected_length = message.expected_length();
  return ToLayout(message.layout(), &request->layout);
}

void LoadSequenceReactor::Enqueue(Chunk* chunk) {
  const absl::Status status = fleet_->Enqueue(&chunk->operation);
  if (!status.ok()) Complete(status);  // else the chunk may be complete already: do not touch it
}

void LoadSequenceReactor::Complete(const absl::Status& status) {
  Chunk* next = nullptr;
  std::unique_ptr<Chunk> done;  // destroyed after the lock is released
  {
    MutexLock lock(&mutex_);
    done = std::move(running_);
    done->End(status);
    if (!status.ok() && (!end_.has_value() || end_->ok())) end_ = status;
    next = StartNext();
    Advance();
  }
  if (next != nullptr) Enqueue(next);
}

LoadSequenceReactor::Chunk* LoadSequenceReactor::StartNext() {
  // A chunk that was received before the client half-closed is appended; after an error, none is.
  const bool failed = end_.has_value() && !end_->ok();
  if (failed || running_ != nullptr || received_ == nullptr) return nullptr;
  running_ = std::move(received_);
  return running_.get();
}

void LoadSequenceReactor::Advance() {
  if (finished_) return;
  if (end_.has_value() && !end_->ok() && received_ != nullptr) {
    received_->End(*end_);
    received_.reset();
  }
  if (!end_.has_value() && !reading_ && receiving_ == nullptr && received_ == nullptr) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (end_.has_value() && receiving_ == nullptr && running_ == nullptr) {
    const absl::Status status = end_->ok() ? WriteResponse() : *end_;
    End(status, status.ok() ? response_->Length() : 0);
  }
}

absl::Status LoadSequenceReactor::WriteResponse() {
  if (!sequence_.has_value()) {
    return absl::InvalidArgumentError("the stream had no message: nothing names a sequence");
  }
  const absl::StatusOr<SequenceInfo> info =
      fleet_->EngineOf(*sequence_).sequences().Get(*sequence_, identity_);
  if (info.ok()) {
    v1::LoadSequenceResponse response;
    *response.mutable_sequence() = ToSequenceInfo(*info, fleet_->DeviceIdOf(*sequence_));
    const grpc::Slice slice(response.SerializeAsString());
    *response_ = grpc::ByteBuffer(&slice, 1);
  }
  return info.status();
}

void LoadSequenceReactor::CancelRequests() {
  for (Chunk* chunk : {running_.get(), receiving_.get()}) {
    if (chunk != nullptr) chunk->operation.Cancel();
  }
}

}  // namespace flashcore::server
