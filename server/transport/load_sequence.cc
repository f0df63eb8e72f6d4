#include "server/transport/load_sequence.h"

#include <utility>

namespace flashcore::server {

LoadSequenceReactor::LoadSequenceReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc,
                                         StreamSet* set, grpc::ServerContextBase* call,
                                         TimePoint deadline, grpc::ByteBuffer* response)
    : StreamReactor(set, context, rpc, call),
      fleet_(fleet),
      deadline_(deadline),
      response_(response),
      chunks_(fleet, /*regions=*/nullptr, identity_) {
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
  AttendOperation& operation = chunk->operation;
  operation.identity = identity_;
  operation.deadline = deadline_;
  operation.done = [this](const absl::Status& result) { Complete(result); };
  return chunks_.Parse(incoming_, &operation, &chunk->receiver.tensors);
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
  v1::LoadSequenceResponse response;
  const absl::Status status = chunks_.Finish(&response);
  if (status.ok()) {
    const grpc::Slice slice(response.SerializeAsString());
    *response_ = grpc::ByteBuffer(&slice, 1);
  }
  return status;
}

void LoadSequenceReactor::CancelRequests() {
  for (Chunk* chunk : {running_.get(), receiving_.get()}) {
    if (chunk != nullptr) chunk->operation.Cancel();
  }
}

}  // namespace flashcore::server
