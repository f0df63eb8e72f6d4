#include "server/transport/register_memory.h"

#include <utility>

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
                                             grpc::ServerContextBase* call)
    : StreamReactor(set, context, rpc, call), memory_(memory) {
  Begin();
  MutexLock lock(&mutex_);
  if (finished_) return;
  if (memory_ == nullptr) {
    StopReadingLocked(CannotShareMemory());
  } else {
    StartRead(&request_);
  }
}

void RegisterMemoryReactor::OnReadDone(bool ok) {
  MutexLock lock(&mutex_);
  if (finished_) return;
  // Not ok: the client has half-closed, or is gone.
  const absl::Status status = ok ? Answer() : absl::OkStatus();
  if (ok && status.ok()) {
    StartWrite(&response_);
  } else {
    StopReadingLocked(status);
  }
}

absl::Status RegisterMemoryReactor::Answer() {
  if (!region_id_.empty()) {
    return absl::InvalidArgumentError("message: the stream takes no more messages");
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
        "challenge: the segment does not begin with it, so it may not be the client's");
  }
  absl::StatusOr<std::string> id = memory_->Register(*std::move(segment), identity_.name);
  if (!id.ok()) return id.status();
  region_id_ = *std::move(id);
  response_.clear_challenge();
  response_.set_region_id(region_id_);
  return absl::OkStatus();
}

void RegisterMemoryReactor::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  if (!finished_ && ok) StartRead(&request_);  // if not ok, gRPC calls OnCancel
}

void RegisterMemoryReactor::Advance() {
  if (finished_ || !end_.has_value()) return;
  if (!region_id_.empty()) memory_->Unregister(region_id_);
  End(*end_);
}

}  // namespace flashcore::server
