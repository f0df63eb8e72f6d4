#include "client/cpp/sequence.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/attend_call.h"
#include "client/cpp/codec.h"
#include "client/cpp/connection.h"
#include "client/cpp/load_rows.h"

namespace flashcore {
namespace {

using Stub = v1::AttentionService::Stub;

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

}  // namespace

Sequence::Sequence(ConnectionPtr connection, std::string id, const SequenceOptions& options)
    : connection_(std::move(connection)), id_(std::move(id)), options_(options) {}

absl::Status Sequence::CheckId(absl::string_view id) {
  if (id.size() == kIdBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_id: ", id.size(), " bytes; want ", kIdBytes));
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
  return Sequence(std::move(connection), std::string(id), options);
}

size_t Sequence::RowBytes() const {
  return size_t{options_.num_kv_heads} * options_.head_dim * kElementBytes;
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
  client::RowsToLoad rows;
  rows.sequence_id = id_;
  rows.layer = layer;
  rows.expected_length = expected_length;
  rows.layout = layout;
  rows.num_rows = key.size() / row_bytes;
  rows.num_kv_heads = options_.num_kv_heads;
  rows.key = key;
  rows.value = value;
  return InfoOf(client::LoadRows(*connection_, rows, kMessageBytes, connection_->Deadline(call)));
}

absl::Status Sequence::Attend(AttendRequest request, AttendResult* result,
                              const CallOptions& call) const {
  if (request.spans.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("spans: ", request.spans.size(), "; want 1 on one sequence"));
  }
  request.spans[0].sequence_id = id_;
  request.num_kv_heads = options_.num_kv_heads;
  request.head_dim = options_.head_dim;
  request.dtype = options_.dtype;
  return client::CallAttend(*connection_, request, result, call);
}

absl::StatusOr<Sequence> Sequence::Fork(std::optional<uint64_t> length, bool pin,
                                        const CallOptions& call) const {
  v1::ForkSequenceRequest request;
  request.set_sequence_id(id_);
  if (length.has_value()) request.set_length(*length);
  request.set_pin(pin);
  const absl::StatusOr<v1::ForkSequenceResponse> response =
      connection_->Call(&Stub::ForkSequence, request, /*safe_to_repeat=*/false, call);
  if (!response.ok()) return response.status();
  if (absl::Status status = CheckId(response->sequence_id()); !status.ok()) {
    return absl::InternalError(absl::StrCat("reply: ", status.message()));
  }
  SequenceOptions options = options_;
  options.pin = pin;
  return Sequence(connection_, response->sequence_id(), options);
}

absl::StatusOr<v1::SequenceInfo> Sequence::Truncate(uint64_t length,
                                                    std::optional<uint64_t> expected_length,
                                                    const CallOptions& call) const {
  v1::TruncateSequenceRequest request;
  request.set_sequence_id(id_);
  request.set_length(length);
  if (expected_length.has_value()) request.set_expected_length(*expected_length);
  return InfoOf(connection_->Call(&Stub::TruncateSequence, request, /*safe_to_repeat=*/true, call));
}

absl::Status Sequence::Delete(const CallOptions& call) const {
  v1::DeleteSequenceRequest request;
  request.set_sequence_id(id_);
  int attempts = 0;
  absl::Status status =
      connection_->Call(&Stub::DeleteSequence, request, /*safe_to_repeat=*/true, call, &attempts)
          .status();
  return absl::IsNotFound(status) && attempts > 1 ? absl::OkStatus() : status;
}

absl::StatusOr<v1::SequenceInfo> Sequence::Info(const CallOptions& call) const {
  return GetInfo(*connection_, id_, call);
}

}  // namespace flashcore
