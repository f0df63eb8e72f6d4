#include "server/transport/grpc/load_sequence.h"

#include <utility>

namespace flashcore::server {

class LoadSequenceReactor::Chunk final : public Exchange {
 public:
  explicit Chunk(LoadSequenceReactor* stream)  // in incoming_
      : Exchange(stream->origin_, ToRequestMessage(&stream->incoming_)), stream_(stream) {
    operation_.identity = stream->identity_;
    operation_.deadline = stream->deadline_;
  }

  void Start() {
    const wire::MessageView message = message_.view();
    absl::Status status = CheckMessageBytes(*stream_->context_, message.size());
    if (status.ok()) status = stream_->chunks_.Parse(message, &operation_, &tensors_);
    Receive(status);
  }
  using Exchange::Enqueue;
  void End(const absl::Status& status) {
    scope_.Replying(status);
    Record();
  }

 private:
  // It is queued when the chunk before it is appended.
  void Received(const absl::Status& status) override { stream_->Received(status); }
  void Complete(const absl::Status& status) override { stream_->Completed(status); }

  LoadSequenceReactor* const stream_;
};

LoadSequenceReactor::LoadSequenceReactor(const Exchange::Origin& origin, StreamSet* set,
                                         grpc::ServerContextBase* call, TimePoint deadline,
                                         grpc::ByteBuffer* response)
    : StreamReactor(set, origin.context, origin.rpc, call),
      origin_(origin),
      deadline_(deadline),
      response_(response),
      chunks_(origin.fleet, /*regions=*/nullptr, identity_) {
  Begin();
}

LoadSequenceReactor::~LoadSequenceReactor() = default;

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
    receiving_ = std::make_unique<Chunk>(this);
    chunk = receiving_.get();
  }
  chunk->Start();
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
  if (next != nullptr) next->Enqueue();
}

void LoadSequenceReactor::Completed(const absl::Status& status) {
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
  if (next != nullptr) next->Enqueue();
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
  if (status.ok()) *response_ = ToByteBuffer(response.SerializeAsString());
  return status;
}

void LoadSequenceReactor::CancelRequests() {
  for (Chunk* chunk : {running_.get(), receiving_.get()}) {
    if (chunk != nullptr) chunk->Cancel();
  }
}

}  // namespace flashcore::server
