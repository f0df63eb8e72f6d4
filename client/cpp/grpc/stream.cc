// An AttendStream over gRPC.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/answer.h"
#include "client/cpp/encode.h"
#include "client/cpp/grpc/transport.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/stream_core.h"
#include "client/local/process.h"
#include "grpcpp/generic/generic_stub.h"

namespace flashcore::client {
namespace {

constexpr char kStreamMethod[] = "/flashcore.v1.AttentionService/AttendStream";
constexpr size_t kMaxSpans = 1 << 20;  // more than any server allows; bounds a reply's fields

// Owned by its stream, and by itself until OnDone returns. gRPC calls OnReadDone and OnWriteDone on
// its own threads, one of each at a time, and OnDone after the last of them. A hold delays OnDone
// while Send may still start a write. It is removed once, when reading has ended. User callbacks
// never run under the mutex.
class GrpcStream final : public StreamCore,
                         public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public std::enable_shared_from_this<GrpcStream> {
 public:
  GrpcStream(std::shared_ptr<const GrpcTransport> transport, const StreamOptions& options)
      : StreamCore(options), transport_(std::move(transport)) {
    transport_->Prepare(options.deadline, options.affinity, &context_);
  }

  void Start() {
    self_ = shared_from_this();
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
        transport_->callback_channel());
    stub.PrepareBidiStreamingCall(&context_, kStreamMethod, {}, this);
    AddHold();
    StartRead(&read_);
    StartCall();
  }

  absl::Status Send(const AttendRequest& request, Callback done) override
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::StatusOr<EncodedRequest> encoded =
        EncodeRequest(request, transport_->MaxMessageBytes(), /*borrowed=*/nullptr,
                      timeout_ == absl::InfiniteDuration()
                          ? 0
                          : std::max<int64_t>(1, absl::ToInt64Nanoseconds(timeout_)));
    if (!encoded.ok()) return encoded.status();
    absl::MutexLock lock(&mutex_);
    Pending pending;
    pending.destination = std::move(encoded->destination);
    pending.request_bytes = encoded->message.Length();
    pending.done = std::move(done);
    absl::Status status = Admit(request.request_id, std::move(pending));
    if (!status.ok()) return status;
    writes_.push_back(std::move(encoded->message));
    Pump();
    return absl::OkStatus();
  }

  absl::Status Finish() override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    finishing_ = true;
    Pump();
    mutex_.Await(absl::Condition(&done_));
    return final_;
  }

  void Cancel() override { context_.TryCancel(); }

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    write_.Clear();
    if (ok) Pump();  // if not, the stream has ended: OnReadDone and OnDone follow
  }

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    if (ok && TakeAnswer()) return StartRead(&read_);
    {
      absl::MutexLock lock(&mutex_);
      broken_ = true;
    }
    RemoveHold();
  }

  void OnDone(const grpc::Status& grpc_status) override ABSL_LOCKS_EXCLUDED(mutex_) {
    const std::shared_ptr<GrpcStream> self = std::move(self_);
    absl::flat_hash_map<std::string, Pending> unanswered;
    absl::Status status = FromGrpc(grpc_status);
    {
      absl::MutexLock lock(&mutex_);
      if (!protocol_error_.ok()) status = protocol_error_;
      unanswered.swap(pending_);
      writes_.clear();
    }
    if (status.ok() && !unanswered.empty()) {
      status = absl::InternalError("the server ended the stream without an answer");
    }
    for (auto& [request_id, pending] : unanswered) {
      AttendResult result;
      result.request_id = request_id;
      result.request_bytes = pending.request_bytes;
      result.attempts = 1;
      pending.done(transport_->ExplainDeadline(status, pending.begin), std::move(result));
    }
    absl::MutexLock lock(&mutex_);
    final_ = transport_->ExplainDeadline(status, begin_);
    done_ = true;
  }

 private:
  // Starts the next write, or half-closes after the last one.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || broken_) return;
    if (!writes_.empty()) {
      writing_ = true;
      write_.Swap(&writes_.front());
      writes_.pop_front();
      StartWrite(&write_);
    } else if (finishing_ && !half_closed_) {
      half_closed_ = true;
      StartWritesDone();
    }
  }

  // Delivers the answer in read_. If it is not valid, cancels the stream and returns false.
  bool TakeAnswer() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::StatusOr<Answer> answer = ParseAnswer(read_, kMaxSpans);
    if (!answer.ok()) return Abort(answer.status());
    const Pending pending = TakePending(answer->result.request_id);
    if (pending.done == nullptr) {
      return Abort(absl::InternalError(absl::StrCat("reply: no request with request_id '",
                                                    answer->result.request_id, "' is in flight")));
    }
    absl::Status status = answer->status;
    if (status.ok()) status = CopyAnswer(read_, *answer, pending.destination);
    read_.Clear();
    answer->result.request_bytes = pending.request_bytes;
    answer->result.attempts = 1;
    pending.done(std::move(status), std::move(answer->result));
    return true;
  }

  bool Abort(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    protocol_error_ = std::move(status);
    context_.TryCancel();
    return false;
  }

  const std::shared_ptr<const GrpcTransport> transport_;
  const absl::Time begin_ = absl::Now();
  grpc::ClientContext context_;
  std::shared_ptr<GrpcStream> self_;  // set by Start, dropped by OnDone
  grpc::ByteBuffer read_;             // of the read in progress

  std::deque<grpc::ByteBuffer> writes_ ABSL_GUARDED_BY(mutex_);  // not yet started
  grpc::ByteBuffer write_ ABSL_GUARDED_BY(mutex_);               // of the write in progress
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status protocol_error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<StreamCore> GrpcTransport::OpenStream(const StreamOptions& options) {
  const std::shared_ptr<GrpcStream> stream =
      local::OwnHere(new GrpcStream(shared_from_this(), options));
  stream->Start();
  return stream;
}

}  // namespace flashcore::client
