#include "server/transport/register_memory.h"

#include <utility>

#include "server/transport/convert.h"

namespace flashcore::server {
namespace {

absl::StatusOr<SharedSegment> Open(const v1::RegisterMemoryRequest& request) {
  return SharedSegment::Open(request.name(), request.bytes(), request.read_only());
}

}  // namespace

absl::Status CannotShareMemory() {
  return absl::UnimplementedError(
      "shared memory is for clients on a unix: address of a server with --allow_shared_memory");
}

RegisterMemoryReactor::RegisterMemoryReactor(SharedMemory* memory, RpcContext* context,
                                             RpcMetrics* rpc, StreamSet* set,
                                             absl::StatusOr<std::string> client)
    : memory_(memory), set_(set), client_(client.value_or("")), scope_(context, rpc) {
  set_->Add(this);
  absl::Status status = CheckNotDraining(*context);
  if (status.ok()) status = client.status();
  if (status.ok() && memory_ == nullptr) status = CannotShareMemory();
  MutexLock lock(&mutex_);
  if (finished_) return;  // by a drain, since this joined the set
  if (status.ok()) {
    StartRead(&request_);
  } else {
    End(status);
  }
}

void RegisterMemoryReactor::StopReading(const absl::Status& status) {
  MutexLock lock(&mutex_);
  End(status);
}

void RegisterMemoryReactor::OnReadDone(bool ok) {
  MutexLock lock(&mutex_);
  if (finished_) return;
  // Not ok: the client has half-closed, or is gone.
  const absl::Status status = ok ? Take() : absl::OkStatus();
  if (ok && status.ok()) {
    StartWrite(&response_);
  } else {
    End(status);
  }
}

absl::Status RegisterMemoryReactor::Take() {
  if (!region_id_.empty()) {
    return absl::InvalidArgumentError("message: nothing more is expected on this stream");
  }
  return claim_.has_value() ? Register() : Challenge();
}

absl::Status RegisterMemoryReactor::Challenge() {
  if (absl::Status status = Open(request_).status(); !status.ok()) return status;
  claim_ = request_;
  challenge_ = SharedMemory::RandomId();
  response_.set_challenge(challenge_);
  return absl::OkStatus();
}

absl::Status RegisterMemoryReactor::Register() {
  absl::StatusOr<SharedSegment> segment = Open(*claim_);
  if (!segment.ok()) return segment.status();
  if (!segment->StartsWith(challenge_)) {
    return absl::PermissionDeniedError(
        "challenge: the segment does not begin with it, which would show that it is the client's");
  }
  absl::StatusOr<std::string> id = memory_->Register(*std::move(segment), client_);
  if (!id.ok()) return id.status();
  region_id_ = *std::move(id);
  response_.clear_challenge();
  response_.set_region_id(region_id_);
  return absl::OkStatus();
}

void RegisterMemoryReactor::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  if (!finished_ && ok) StartRead(&request_);  // if not ok, OnCancel comes
}

void RegisterMemoryReactor::OnCancel() {
  MutexLock lock(&mutex_);
  End(absl::CancelledError("cancelled by the client"));
}

// A read may still be with gRPC; Finish makes it return.
void RegisterMemoryReactor::End(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  if (!region_id_.empty()) memory_->Unregister(region_id_);
  scope_.set_status(status.code());
  Finish(ToGrpcStatus(status));
}

void RegisterMemoryReactor::OnDone() {
  set_->Remove(this);
  // Whoever called Finish may still hold the lock.
  { MutexLock lock(&mutex_); }
  delete this;
}

}  // namespace flashcore::server
