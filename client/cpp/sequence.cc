#include "client/cpp/sequence.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/attend_call.h"
#include "client/cpp/codec.h"
#include "client/cpp/connection.h"
#include "client/cpp/load_rows.h"

namespace flashcore {
namespace {

using Stub = v1::AttentionService::Stub;

absl::Status CheckId(absl::string_view id) {
  if (id.size() == Sequence::kIdBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_id: ", id.size(), " bytes; want ", Sequence::kIdBytes));
}

absl::Status CheckReplyId(absl::string_view id) {
  absl::Status status = CheckId(id);
  return status.ok() ? status : absl::InternalError(absl::StrCat("reply: ", status.message()));
}

std::string RandomAffinity() {
  absl::InsecureBitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

// Of an answer that holds little but a SequenceInfo.
template <typename Response>
absl::StatusOr<v1::SequenceInfo> InfoOf(absl::StatusOr<Response> response) {
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::StatusOr<v1::SequenceInfo> GetInfo(const client::Connection& connection, absl::string_view id,
                                         const CallOptions& call) {
  v1::GetSequenceRequest request;
  request.set_sequence_id(std::string(id));
  return InfoOf(connection.Call(&Stub::GetSequence, request, /*safe_to_repeat=*/true, call));
}

const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace

// What a handle names.
struct Sequence::Resident {
  ConnectionPtr connection;
  std::string id;
  SequenceOptions options;
};

struct Sequence::State {
  absl::Mutex reload_mutex ABSL_ACQUIRED_BEFORE(mutex);  // held while the callback runs
  Reload reload ABSL_GUARDED_BY(reload_mutex);           // null: what is lost stays lost
  absl::Mutex mutex;
  std::shared_ptr<const Resident> resident ABSL_GUARDED_BY(mutex);
};

Sequence::Sequence(ConnectionPtr connection, std::string id, const SequenceOptions& options)
    : state_(std::make_shared<State>()) {
  absl::MutexLock lock(&state_->mutex);
  state_->resident =
      std::make_shared<const Resident>(Resident{std::move(connection), std::move(id), options});
}

absl::StatusOr<Sequence> Sequence::Create(ConnectionPtr connection, SequenceOptions options,
                                          const CallOptions& call) {
  if (options.affinity.empty()) options.affinity = RandomAffinity();
  v1::CreateSequenceRequest request;
  request.set_num_layers(options.num_layers);
  request.set_num_kv_heads(options.num_kv_heads);
  request.set_head_dim(options.head_dim);
  request.set_dtype(client::ToProto(options.dtype));
  request.set_pin(options.pin);
  request.set_device_id(options.device_id);
  const auto response = connection->Call(&Stub::CreateSequence, request, /*safe_to_repeat=*/false,
                                         {call.deadline, options.affinity});
  if (!response.ok()) return response.status();
  if (absl::Status status = CheckReplyId(response->sequence_id()); !status.ok()) return status;
  options.device_id = response->sequence().device_id();
  return Sequence(std::move(connection), response->sequence_id(), options);
}

absl::StatusOr<Sequence> Sequence::Open(ConnectionPtr connection, absl::string_view id,
                                        const CallOptions& call) {
  if (absl::Status status = CheckId(id); !status.ok()) return status;
  const absl::StatusOr<v1::SequenceInfo> info = GetInfo(*connection, id, call);
  if (!info.ok()) return info.status();
  SequenceOptions options;
  options.num_layers = info->num_layers();
  options.num_kv_heads = info->num_kv_heads();
  options.head_dim = info->head_dim();
  options.dtype = info->dtype() == v1::DTYPE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
  options.pin = info->pin();
  options.device_id = info->device_id();
  options.affinity = call.affinity;
  return Sequence(std::move(connection), std::string(id), options);
}

void Sequence::OnLost(Reload reload) {
  absl::MutexLock lock(&state_->reload_mutex);
  state_->reload = std::move(reload);
}

std::shared_ptr<const Sequence::Resident> Sequence::resident() const {
  absl::MutexLock lock(&state_->mutex);
  return state_->resident;
}

std::string Sequence::id() const { return resident()->id; }

SequenceOptions Sequence::options() const { return resident()->options; }

size_t Sequence::RowBytes() const {
  const std::shared_ptr<const Resident> now = resident();
  return size_t{now->options.num_kv_heads} * now->options.head_dim * kElementBytes;
}

// The sequence that has taken the place of `lost`: made here, unless another thread was faster.
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

// Calls `operation` with what the handle names and how to call it; see OnLost.
template <typename Operation>
auto Sequence::WithReload(const CallOptions& call, Operation operation) const {
  std::shared_ptr<const Resident> now = resident();
  CallOptions routed = {now->connection->Deadline(call), now->options.affinity};
  auto result = operation(*now, routed);
  if (!absl::IsNotFound(StatusOf(result))) return result;
  absl::StatusOr<std::shared_ptr<const Resident>> reloaded = ReloadLost(now, StatusOf(result));
  if (!reloaded.ok()) return decltype(result)(reloaded.status());
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
  return WithReload(call, [&](const Resident& now, const CallOptions& routed) {
    client::RowsToLoad rows;
    rows.sequence_id = now.id;
    rows.layer = layer;
    rows.expected_length = expected_length;
    rows.layout = layout;
    rows.num_rows = key.size() / row_bytes;
    rows.num_kv_heads = now.options.num_kv_heads;
    rows.key = key;
    rows.value = value;
    return InfoOf(
        client::LoadRows(*now.connection, rows, kMessageBytes, *routed.deadline, routed.affinity));
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
  v1::ForkSequenceRequest request;
  if (length.has_value()) request.set_length(*length);
  request.set_pin(pin);
  return WithReload(
      call, [&](const Resident& now, const CallOptions& routed) -> absl::StatusOr<Sequence> {
        request.set_sequence_id(now.id);
        const absl::StatusOr<v1::ForkSequenceResponse> response =
            now.connection->Call(&Stub::ForkSequence, request, /*safe_to_repeat=*/false, routed);
        if (!response.ok()) return response.status();
        if (absl::Status status = CheckReplyId(response->sequence_id()); !status.ok()) {
          return status;
        }
        SequenceOptions options = now.options;
        options.pin = pin;
        return Sequence(now.connection, response->sequence_id(), options);
      });
}

absl::StatusOr<v1::SequenceInfo> Sequence::Truncate(uint64_t length,
                                                    std::optional<uint64_t> expected_length,
                                                    const CallOptions& call) const {
  v1::TruncateSequenceRequest request;
  request.set_length(length);
  if (expected_length.has_value()) request.set_expected_length(*expected_length);
  return WithReload(call, [&](const Resident& now, const CallOptions& routed) {
    request.set_sequence_id(now.id);
    return InfoOf(
        now.connection->Call(&Stub::TruncateSequence, request, /*safe_to_repeat=*/true, routed));
  });
}

absl::Status Sequence::Delete(const CallOptions& call) const {
  {
    absl::MutexLock lock(&state_->reload_mutex);
    state_->reload = nullptr;
  }
  const std::shared_ptr<const Resident> now = resident();
  v1::DeleteSequenceRequest request;
  request.set_sequence_id(now->id);
  int attempts = 0;
  absl::Status status = now->connection
                            ->Call(&Stub::DeleteSequence, request, /*safe_to_repeat=*/true,
                                   {call.deadline, now->options.affinity}, &attempts)
                            .status();
  return absl::IsNotFound(status) && attempts > 1 ? absl::OkStatus() : status;
}

absl::StatusOr<v1::SequenceInfo> Sequence::Info(const CallOptions& call) const {
  return WithReload(call, [](const Resident& now, const CallOptions& routed) {
    return GetInfo(*now.connection, now.id, routed);
  });
}

}  // namespace flashcore
