#include "flashcore/sequence.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/attend_call.h"
#include "client/cpp/connection.h"
#include "client/cpp/encode.h"
#include "client/cpp/lease.h"
#include "client/cpp/load_rows.h"
#include "client/cpp/memory.h"
#include "client/cpp/sequence_calls.h"
#include "client/local/process.h"
#include "flashcore/error_info.h"

namespace flashcore {
namespace {

// The SequenceInfo of a response.
template <typename Response>
absl::StatusOr<v1::SequenceInfo> InfoOf(absl::StatusOr<Response> response) {
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

// Whether the sequence is lost, and not something else that the call names.
bool IsLost(const absl::Status& status) {
  if (!absl::IsNotFound(status)) return false;
  const std::string reason = GetErrorInfo(status).reason;
  return reason.empty() || reason == "SEQUENCE_LOST";
}

const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// Appends all rows, in messages of at most kMessageBytes and of at most the client's limit. A row
// is never split: RESOURCE_EXHAUSTED if one is over the limit. If `rows` has an expected_length,
// every message carries its own. After an error, the first messages may have taken effect.
absl::StatusOr<v1::LoadSequenceResponse> LoadRows(const client::Connection& connection,
                                                  const client::RowsToLoad& rows,
                                                  const CallOptions& call) {
  absl::StatusOr<v1::LoadSequenceResponse> response = v1::LoadSequenceResponse();
  int attempts = 0;
  absl::Status status = connection.WithRetries(
      /*safe_to_repeat=*/false, *call.deadline, &attempts, [&] {
        response = connection.transport().LoadRows(rows, call);
        return response.status();
      });
  if (!status.ok()) return status;
  return response;
}

}  // namespace

// The target of a handle.
struct Sequence::Resident {
  ConnectionPtr connection;
  std::string id;
  SequenceOptions options;
};

struct Sequence::State {
  explicit State(std::shared_ptr<const Resident> made) : first(made), resident(std::move(made)) {}

  const std::shared_ptr<const Resident> first;           // what the handle was made with
  absl::Mutex reload_mutex ABSL_ACQUIRED_BEFORE(mutex);  // held while the callback runs
  Reload reload ABSL_GUARDED_BY(reload_mutex);           // null: no reload
  absl::Mutex mutex;
  std::shared_ptr<const Resident> resident ABSL_GUARDED_BY(mutex);
};

Sequence::Sequence(ConnectionPtr connection, std::string id, const SequenceOptions& options)
    : state_(client::local::OwnHere(new State(std::make_shared<const Resident>(
          Resident{std::move(connection), std::move(id), options})))) {}

absl::Status Sequence::CheckProcess() const { return state_->first->connection->CheckProcess(); }

absl::StatusOr<Sequence> Sequence::Create(ConnectionPtr connection, SequenceOptions options,
                                          const CallOptions& call) {
  if (absl::Status status = connection->CheckProcess(); !status.ok()) return status;
  options.affinity = client::AffinityFor(*connection, options.affinity);
  const CallOptions routed = {connection->Deadline(call), options.affinity};
  v1::CreateSequenceRequest request = client::CreateMessage(options);
  const auto response = client::WithLease(*connection, routed, [&](const std::string& lease_id) {
    request.set_lease_id(lease_id);
    return connection->Call<v1::CreateSequenceResponse>(request, /*safe_to_repeat=*/false, routed);
  });
  if (!response.ok()) return response.status();
  absl::Status status = client::CheckReplyId(response->sequence_id());
  if (!status.ok()) return status;
  options.device_id = response->sequence().device_id();
  return Sequence(std::move(connection), response->sequence_id(), options);
}

absl::StatusOr<Sequence> Sequence::Open(ConnectionPtr connection, absl::string_view id,
                                        const CallOptions& call) {
  if (absl::Status status = client::CheckId(id); !status.ok()) return status;
  const absl::StatusOr<v1::SequenceInfo> info = client::GetInfo(*connection, id, call);
  if (!info.ok()) return info.status();
  SequenceOptions options;
  options.num_layers = info->num_layers();
  options.num_kv_heads = info->num_kv_heads();
  options.head_dim = info->head_dim();
  options.dtype = client::FromProto(info->dtype());
  options.kv_dtype = client::FromProto(info->kv_dtype());
  options.pin = info->pin();
  options.device_id = info->device_id();
  options.affinity = call.affinity;
  options.shared = info->shared();
  options.group = info->group();
  options.idle_timeout = absl::Seconds(info->idle_timeout_seconds());
  return Sequence(std::move(connection), std::string(id), options);
}

void Sequence::OnLost(Reload reload) {
  if (!CheckProcess().ok()) return;
  absl::MutexLock lock(&state_->reload_mutex);
  state_->reload = std::move(reload);
}

// In a child that was forked, a thread of the parent's may have had the lock.
std::shared_ptr<const Sequence::Resident> Sequence::resident() const {
  if (!state_->first->connection->OfThisProcess()) return state_->first;
  absl::MutexLock lock(&state_->mutex);
  return state_->resident;
}

std::string Sequence::id() const { return resident()->id; }

SequenceOptions Sequence::options() const { return resident()->options; }

size_t Sequence::RowBytes() const {
  const std::shared_ptr<const Resident> now = resident();
  return size_t{now->options.num_kv_heads} * now->options.head_dim * kElementBytes;
}

// The sequence that replaces `lost`: created here, unless another thread has done it already.
absl::StatusOr<std::shared_ptr<const Sequence::Resident>> Sequence::ReloadLost(
    const std::shared_ptr<const Resident>& lost, const absl::Status& not_found) const {
  absl::MutexLock reload_lock(&state_->reload_mutex);
  if (std::shared_ptr<const Resident> now = resident(); now != lost) return now;
  if (state_->reload == nullptr) return not_found;
  SequenceOptions options = lost->options;
  options.device_id.clear();
  const absl::StatusOr<Sequence> made = state_->reload(options);
  if (!made.ok()) return made.status();
  std::shared_ptr<const Resident> now = made->resident();
  absl::MutexLock lock(&state_->mutex);
  state_->resident = now;
  return now;
}

// Calls `operation`, and once more after a reload if the sequence was lost; see OnLost.
template <typename Operation>
auto Sequence::WithReload(const CallOptions& call, Operation operation) const {
  std::shared_ptr<const Resident> now = resident();
  CallOptions routed = {now->connection->Deadline(call), now->options.affinity};
  using Result = decltype(operation(*now, routed));
  if (absl::Status status = CheckProcess(); !status.ok()) return Result(status);
  Result result = operation(*now, routed);
  if (!IsLost(StatusOf(result))) return result;
  absl::StatusOr<std::shared_ptr<const Resident>> reloaded = ReloadLost(now, StatusOf(result));
  if (!reloaded.ok()) return Result(reloaded.status());
  routed.affinity = (*reloaded)->options.affinity;
  return operation(**reloaded, routed);
}

absl::StatusOr<v1::SequenceInfo> Sequence::Append(uint32_t layer, absl::Span<const std::byte> key,
                                                  absl::Span<const std::byte> value, Layout layout,
                                                  std::optional<uint64_t> expected_length,
                                                  const CallOptions& call) const {
  const size_t row_bytes = RowBytes();
  if (key.empty() || key.size() % row_bytes != 0 || value.size() != key.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "key, value: ", key.size(), " and ", value.size(),
        " bytes; want the same number of rows of ", row_bytes, " bytes in both, at least 1"));
  }
  absl::Status on_host = client::CheckOnHost("key", key.data());
  on_host.Update(client::CheckOnHost("value", value.data()));
  if (!on_host.ok()) return on_host;
  return WithReload(call, [&](const Resident& now, const CallOptions& routed) {
    const client::RowsToLoad rows = {now.id,
                                     layer,
                                     expected_length,
                                     layout,
                                     /*num_rows=*/key.size() / row_bytes,
                                     now.options.num_kv_heads,
                                     key,
                                     value};
    return InfoOf(LoadRows(*now.connection, rows, routed));
  });
}

absl::Status Sequence::Attend(AttendRequest request, AttendResult* result,
                              const CallOptions& call) const {
  if (request.spans.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("spans: ", request.spans.size(), "; want 1 on one sequence"));
  }
  return WithReload(call, [&](const Resident& now, const CallOptions& routed) {
    request.spans[0].sequence_id = now.id;
    request.num_kv_heads = now.options.num_kv_heads;
    request.head_dim = now.options.head_dim;
    request.dtype = now.options.dtype;
    return client::CallAttend(*now.connection, request, result, routed);
  });
}

absl::StatusOr<Sequence> Sequence::Fork(std::optional<uint64_t> length, bool pin,
                                        const CallOptions& call) const {
  ForkOptions options;
  options.length = length;
  options.pin = pin;
  return Fork(options, call);
}

absl::StatusOr<Sequence> Sequence::Fork(const ForkOptions& fork, const CallOptions& call) const {
  return WithReload(
      call, [&](const Resident& now, const CallOptions& routed) -> absl::StatusOr<Sequence> {
        v1::ForkSequenceRequest request = client::ForkMessage(now.id, fork);
        const absl::StatusOr<v1::ForkSequenceResponse> response =
            client::WithLease(*now.connection, routed, [&](const std::string& lease_id) {
              request.set_lease_id(lease_id);
              return now.connection->Call<v1::ForkSequenceResponse>(
                  request, /*safe_to_repeat=*/false, routed);
            });
        if (!response.ok()) return response.status();
        absl::Status status = client::CheckReplyId(response->sequence_id());
        if (!status.ok()) return status;
        return Sequence(now.connection, response->sequence_id(),
                        client::OptionsOfFork(now.options, fork));
      });
}

absl::StatusOr<v1::SequenceInfo> Sequence::Truncate(uint64_t length,
                                                    std::optional<uint64_t> expected_length,
                                                    const CallOptions& call) const {
  return WithReload(call, [&](const Resident& now, const CallOptions& routed) {
    const auto request = client::TruncateMessage(now.id, length, expected_length);
    int attempts = 0;
    auto info = InfoOf(now.connection->Call<v1::TruncateSequenceResponse>(request,
                                                                          /*safe_to_repeat=*/true,
                                                                          routed, &attempts));
    return client::TruncateOutcome(*now.connection, request, std::move(info), attempts, routed);
  });
}

absl::Status Sequence::Delete(const CallOptions& call) const {
  if (absl::Status status = CheckProcess(); !status.ok()) return status;
  {
    absl::MutexLock lock(&state_->reload_mutex);
    state_->reload = nullptr;
  }
  const std::shared_ptr<const Resident> now = resident();
  v1::DeleteSequenceRequest request;
  request.set_sequence_id(now->id);
  int attempts = 0;
  absl::Status status =
      now->connection
          ->Call<v1::DeleteSequenceResponse>(request, /*safe_to_repeat=*/true,
                                             {call.deadline, now->options.affinity}, &attempts)
          .status();
  return client::DeleteOutcome(status, attempts);
}

absl::StatusOr<v1::SequenceInfo> Sequence::Info(const CallOptions& call) const {
  return WithReload(call, [](const Resident& now, const CallOptions& routed) {
    return client::GetInfo(*now.connection, now.id, routed);
  });
}

}  // namespace flashcore
