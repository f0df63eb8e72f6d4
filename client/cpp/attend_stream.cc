#include "flashcore/attend_stream.h"

#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"
#include "client/cpp/stream_core.h"
#include "client/cpp/transport.h"

namespace flashcore {

namespace client {

absl::Status StreamCore::Admit(const std::string& request_id, Pending pending) {
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

StreamCore::Pending StreamCore::TakePending(const std::string& request_id) {
  Pending pending;
  absl::MutexLock lock(&mutex_);
  const auto it = pending_.find(request_id);
  if (it != pending_.end()) {
    pending = std::move(it->second);
    pending_.erase(it);
  }
  return pending;
}

absl::Status StreamCore::SendForReceive(const AttendRequest& request) {
  absl::MutexLock lock(&receive_mutex_);  // counted before the answer can come
  absl::Status status = Send(request, [this](absl::Status answer, AttendResult result) {
    absl::MutexLock receive_lock(&receive_mutex_);
    answers_.push_back({std::move(answer), std::move(result)});
  });
  if (status.ok()) ++to_receive_;
  return status;
}

bool StreamCore::Receive(AttendStream::Answer* answer) {
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

}  // namespace client

std::unique_ptr<AttendStream> AttendStream::Open(
    const std::shared_ptr<const client::Connection>& connection, const StreamOptions& options) {
  auto core = connection->OfThisProcess() ? connection->transport().OpenStream(options) : nullptr;
  return absl::WrapUnique(new AttendStream(connection, std::move(core)));
}

AttendStream::AttendStream(std::shared_ptr<const client::Connection> connection,
                           std::shared_ptr<client::StreamCore> core)
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

}  // namespace flashcore
