#include "server/transport/load_sequence.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/transport/convert.h"
#include "server/transport/message.h"

namespace flashcore::server {

LoadSequenceReactor::LoadSequenceReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc,
                                         StreamSet* set, absl::StatusOr<std::string> client,
                                         TimePoint deadline, grpc::ByteBuffer* response)
    : fleet_(fleet),
      context_(context),
      rpc_(rpc),
      set_(set),
      client_(client.value_or("")),
      deadline_(deadline),
      response_(response),
      scope_(context, rpc) {
  set_->Add(this);
  MutexLock lock(&mutex_);
  // Checked after joining the set, so that a drain that begins now is not missed.
  if (absl::Status status = CheckNotDraining(*context_); !status.ok()) end_ = std::move(status);
  if (!client.ok()) end_ = client.status();
  Advance();
}

void LoadSequenceReactor::StopReading(const absl::Status& status) {
  MutexLock lock(&mutex_);
  if (!end_.has_value()) end_ = status;
  Advance();
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
  chunk->receiver.Start(Parse(chunk), [this](const absl::Status& status) { Received(status); });
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
  operation.client = client_;
  operation.deadline = deadline_;
  operation.done = [this](const absl::Status& result) { Complete(result); };
  return status;
}

void LoadSequenceReactor::Received(const absl::Status& status) {
  Chunk* to_submit = nullptr;
  {
    MutexLock lock(&mutex_);
    received_ = std::move(receiving_);
    if (!status.ok()) {
      received_->scope.Replying(status);
      received_->scope.Record("");
      received_.reset();
      if (!end_.has_value()) end_ = status;
    }
    to_submit = Advance();
  }
  if (to_submit != nullptr) Submit(to_submit);
}

absl::Status LoadSequenceReactor::ToRequest(const v1::LoadSequenceRequest& message,
                                            AttendRequest* request) {
  if (!sequence_.has_value()) {
    absl::StatusOr<SequenceId> id = ToSequenceId(message.sequence_id());
    if (!id.ok()) return id.status();
    absl::StatusOr<SequenceInfo> info = fleet_->EngineOf(*id).sequences().Get(*id);
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

void LoadSequenceReactor::Submit(Chunk* chunk) {
  const absl::Status status = fleet_->Submit(&chunk->operation);
  if (!status.ok()) Complete(status);  // else Complete will be called, or has been: hands off
}

void LoadSequenceReactor::Complete(const absl::Status& status) {
  Chunk* to_submit = nullptr;
  std::unique_ptr<Chunk> done;
  {
    MutexLock lock(&mutex_);
    done = std::move(running_);
    done->scope.Replying(status);
    done->scope.Record("");
    if (!status.ok() && (!end_.has_value() || end_->ok())) end_ = status;
    to_submit = Advance();
  }
  if (to_submit != nullptr) Submit(to_submit);
}

LoadSequenceReactor::Chunk* LoadSequenceReactor::Advance() {
  if (finished_) return nullptr;
  Chunk* to_submit = nullptr;
  // What was received before a client half-closed is still appended; after an error, nothing is.
  if (end_.has_value() && !end_->ok() && received_ != nullptr) {
    received_->scope.Replying(*end_);
    received_->scope.Record("");
    received_.reset();
  }
  if (running_ == nullptr && received_ != nullptr) {
    running_ = std::move(received_);
    to_submit = running_.get();
  }
  if (!end_.has_value() && !reading_ && receiving_ == nullptr && received_ == nullptr) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (end_.has_value() && receiving_ == nullptr && running_ == nullptr) End();
  return to_submit;
}

// A read may still be with gRPC when a drain ends the stream; Finish makes it return.
void LoadSequenceReactor::End() {
  finished_ = true;
  absl::Status status = *end_;
  if (status.ok() && !sequence_.has_value()) {
    status = absl::InvalidArgumentError("the stream had no message: nothing names a sequence");
  }
  if (status.ok()) {
    const absl::StatusOr<SequenceInfo> info =
        fleet_->EngineOf(*sequence_).sequences().Get(*sequence_);
    if (info.ok()) {
      v1::LoadSequenceResponse response;
      *response.mutable_sequence() = ToSequenceInfo(*info, fleet_->DeviceIdOf(*sequence_));
      const grpc::Slice slice(response.SerializeAsString());
      *response_ = grpc::ByteBuffer(&slice, 1);
    }
    status = info.status();
  }
  scope_.set_status(status.code());
  Finish(ToGrpcStatus(status));
}

void LoadSequenceReactor::OnCancel() {
  MutexLock lock(&mutex_);
  if (!end_.has_value() || end_->ok()) end_ = absl::CancelledError("cancelled by the client");
  for (Chunk* chunk : {running_.get(), receiving_.get()}) {
    if (chunk != nullptr) chunk->receiver.Cancel();
  }
  Advance();
}

void LoadSequenceReactor::OnDone() {
  set_->Remove(this);
  // Whoever called Finish may still hold the lock.
  { MutexLock lock(&mutex_); }
  delete this;
}

}  // namespace flashcore::server
