#include "flashcore/attend_stream.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/answer.h"
#include "client/cpp/attend_stream_core.h"
#include "client/cpp/connection.h"
#include "client/cpp/encode.h"
#include "client/cpp/grpc_status.h"
#include "client/local/process.h"
#include "grpcpp/generic/generic_stub.h"

namespace flashcore {

constexpr char kStreamMethod[] = "/flashcore.v1.AttentionService/AttendStream";
constexpr char kEchoStreamMethod[] = "/flashcore.v1.DebugService/EchoStream";
constexpr size_t kMaxSpans = 1 << 20;  // more than any server allows; bounds a reply's fields

absl::Status AttendStream::Core::Admit(const std::string& request_id, Pending pending) {
  if (request_id.empty()) {
    return absl::InvalidArgumentError("request_id: empty; a stream needs one");
  }
  if (timeout_ <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("StreamOptions::timeout: ", absl::FormatDuration(timeout_),
                     "; want more than 0; absl::InfiniteDuration() for none"));
  }
  if (broken_) {
    return done_ && !final_.ok() ? final_ : absl::UnavailableError("the stream has ended");
  }
  if (finishing_) return absl::FailedPreconditionError("Send after Finish");
  if (pending_.size() >= max_inflight_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_inflight: ", max_inflight_, " requests of this stream are unanswered"));
  }
  const auto [entry, is_new] = pending_.try_emplace(request_id);
  if (!is_new) {
    return absl::AlreadyExistsError(
        absl::StrCat("request_id: '", request_id, "' is in flight on this stream"));
  }
  entry->second = std::move(pending);
  return absl::OkStatus();
}

AttendStream::Core::Pending AttendStream::Core::TakePending(const std::string& request_id) {
  Pending pending;
  absl::MutexLock lock(&mutex_);
  const auto it = pending_.find(request_id);
  if (it != pending_.end()) {
    pending = std::move(it->second);
    pending_.erase(it);
  }
  return pending;
}

absl::Status AttendStream::Core::SendForReceive(const AttendRequest& request) {
  absl::MutexLock lock(&receive_mutex_);  // counted before the answer can come
  absl::Status status = Send(request, [this](absl::Status answer, AttendResult result) {
    absl::MutexLock receive_lock(&receive_mutex_);
    answers_.push_back({std::move(answer), std::move(result)});
  });
  if (status.ok()) ++to_receive_;
  return status;
}

bool AttendStream::Core::Receive(Answer* answer) {
  absl::MutexLock lock(&receive_mutex_);
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(receive_mutex_) {
    return !answers_.empty() || to_receive_ == 0;
  };
  receive_mutex_.Await(absl::Condition(&ready));
  if (answers_.empty()) return false;
  *answer = std::move(answers_.front());
  answers_.pop_front();
  --to_receive_;
  return true;
}

// Owned by the AttendStream, and by itself until OnDone returns.
//
// gRPC calls OnReadDone and OnWriteDone on its own threads, one of each at a time, and OnDone after
// the last of them. A hold delays OnDone while Send may still start a write. It is removed once,
// when reading has ended. User callbacks never run under the mutex.
class AttendStream::Reactor final
    : public Core,
      public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public std::enable_shared_from_this<Reactor> {
 public:
  using Parse = absl::StatusOr<client::Answer> (*)(const grpc::ByteBuffer& message);

  // A stream of the RPC `method`, whose replies `parse` splits.
  Reactor(const char* method, Parse parse, std::shared_ptr<const client::Connection> connection,
          const StreamOptions& options)
      : Core(options), method_(method), parse_(parse), connection_(std::move(connection)) {
    connection_->Prepare(options.deadline, options.affinity, &context_);
  }

  void Start() {
    self_ = shared_from_this();
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
        connection_->callback_channel());
    stub.PrepareBidiStreamingCall(&context_, method_, {}, this);
    AddHold();
    StartRead(&read_);
    StartCall();
  }

  absl::Status Send(const AttendRequest& request, Callback done) override
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::StatusOr<client::EncodedRequest> encoded =
        client::EncodeRequest(request, connection_->MaxMessageBytes(), /*borrowed=*/nullptr,
                              timeout_ == absl::InfiniteDuration()
                                  ? 0
                                  : std::max<int64_t>(1, absl::ToInt64Nanoseconds(timeout_)));
    if (!encoded.ok()) return encoded.status();
    return Send(request.request_id, *std::move(encoded), std::move(done));
  }

  absl::Status Send(const std::string& request_id, client::EncodedRequest encoded, Callback done)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Pending pending;
    pending.destination = std::move(encoded.destination);
    pending.request_bytes = encoded.message.Length();
    pending.done = std::move(done);
    if (absl::Status status = Admit(request_id, std::move(pending)); !status.ok()) return status;
    writes_.push_back(std::move(encoded.message));
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
    const std::shared_ptr<Reactor> self = std::move(self_);
    absl::flat_hash_map<std::string, Pending> unanswered;
    absl::Status status = client::FromGrpc(grpc_status);
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
      pending.done(connection_->ExplainDeadline(status, pending.begin), std::move(result));
    }
    absl::MutexLock lock(&mutex_);
    final_ = connection_->ExplainDeadline(status, begin_);
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
    absl::StatusOr<client::Answer> answer = parse_(read_);
    if (!answer.ok()) return Abort(answer.status());
    const Pending pending = TakePending(answer->result.request_id);
    if (pending.done == nullptr) {
      return Abort(absl::InternalError(absl::StrCat("reply: no request with request_id '",
                                                    answer->result.request_id, "' is in flight")));
    }
    absl::Status status = answer->status;
    if (status.ok()) status = client::CopyAnswer(read_, *answer, pending.destination);
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

  const char* const method_;
  const Parse parse_;
  const std::shared_ptr<const client::Connection> connection_;
  const absl::Time begin_ = absl::Now();
  grpc::ClientContext context_;
  std::shared_ptr<Reactor> self_;  // set by Start, dropped by OnDone
  grpc::ByteBuffer read_;          // of the read in progress

  std::deque<grpc::ByteBuffer> writes_ ABSL_GUARDED_BY(mutex_);  // not yet started
  grpc::ByteBuffer write_ ABSL_GUARDED_BY(mutex_);               // of the write in progress
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status protocol_error_ ABSL_GUARDED_BY(mutex_);
};

std::unique_ptr<AttendStream> AttendStream::Open(
    const std::shared_ptr<const client::Connection>& connection, const StreamOptions& options) {
  if (!connection->OfThisProcess()) return absl::WrapUnique(new AttendStream(connection, nullptr));
  if (connection->local() != nullptr) {
    return absl::WrapUnique(new AttendStream(connection, OpenLocal(connection, options)));
  }
  const auto parse = [](const grpc::ByteBuffer& message) {
    return client::ParseAnswer(message, kMaxSpans);
  };
  const auto reactor =
      client::local::OwnHere(new Reactor(kStreamMethod, parse, connection, options));
  reactor->Start();
  return absl::WrapUnique(new AttendStream(connection, reactor));
}

AttendStream::AttendStream(std::shared_ptr<const client::Connection> connection,
                           std::shared_ptr<Core> core)
    : connection_(std::move(connection)), core_(std::move(core)) {}

AttendStream::~AttendStream() {
  if (!connection_->OfThisProcess()) return;
  core_->Cancel();
  core_->Finish().IgnoreError();
}

absl::Status AttendStream::Send(const AttendRequest& request, Callback done) {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  return core_->Send(request, std::move(done));
}

absl::Status AttendStream::Send(const AttendRequest& request) {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  return core_->SendForReceive(request);
}

bool AttendStream::Receive(Answer* answer) {
  return connection_->OfThisProcess() && core_->Receive(answer);
}

absl::Status AttendStream::Finish() {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  return core_->Finish();
}

void AttendStream::Cancel() {
  if (connection_->OfThisProcess()) core_->Cancel();
}

std::unique_ptr<EchoStream> EchoStream::Open(
    const std::shared_ptr<const client::Connection>& connection, const StreamOptions& options) {
  if (connection->local() != nullptr) return absl::WrapUnique(new EchoStream(nullptr, nullptr));
  if (!connection->OfThisProcess()) {
    return absl::WrapUnique(
        new EchoStream(nullptr, absl::WrapUnique(new AttendStream(connection, nullptr))));
  }
  const auto reactor = client::local::OwnHere(
      new AttendStream::Reactor(kEchoStreamMethod, &client::ParseEcho, connection, options));
  reactor->Start();
  return absl::WrapUnique(
      new EchoStream(reactor, absl::WrapUnique(new AttendStream(connection, reactor))));
}

EchoStream::EchoStream(std::shared_ptr<AttendStream::Reactor> reactor,
                       std::unique_ptr<AttendStream> stream)
    : reactor_(std::move(reactor)), stream_(std::move(stream)) {}

absl::Status EchoStream::Send(const std::string& request_id, absl::Span<const std::byte> payload,
                              absl::Span<std::byte> reply, AttendStream::Callback done) {
  if (stream_ == nullptr) {
    return absl::UnimplementedError("EchoStream: not over the local socket");
  }
  if (absl::Status status = stream_->connection_->CheckProcess(); !status.ok()) return status;
  return reactor_->Send(request_id, client::EncodeEcho(request_id, payload, reply),
                        std::move(done));
}

absl::Status EchoStream::Finish() {
  if (stream_ != nullptr) return stream_->Finish();
  return absl::UnimplementedError("EchoStream: not over the local socket");
}

}  // namespace flashcore
