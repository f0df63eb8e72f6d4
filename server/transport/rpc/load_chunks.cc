#include "server/transport/rpc/load_chunks.h"

#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/unknown_fields.h"

namespace flashcore::server {

absl::Status LoadChunks::Parse(const wire::MessageView& message, AttendOperation* operation,
                               TensorFields* tensors) {
  (*tensors)[kKey].number = v1::LoadSequenceRequest::kKeyFieldNumber;
  (*tensors)[kValue].number = v1::LoadSequenceRequest::kValueFieldNumber;
  v1::LoadSequenceRequest parsed;
  absl::Status status = ParseMessage(message, absl::MakeSpan(*tensors), &parsed);
  AttendRequest& request = operation->request;
  if (status.ok()) status = CheckKnownFields(parsed);
  if (status.ok()) status = ToRequest(parsed, &request);
  request.key_bytes = (*tensors)[kKey].size;
  request.value_bytes = (*tensors)[kValue].size;
  return status.ok() ? ToMemoryRanges(parsed, regions_, &request) : status;
}

absl::Status LoadChunks::ToRequest(const v1::LoadSequenceRequest& message, AttendRequest* request) {
  if (!sequence_.has_value()) {
    absl::StatusOr<SequenceId> id = ToSequenceId(message.sequence_id());
    if (!id.ok()) return id.status();
    absl::StatusOr<SequenceInfo> info = fleet_->EngineOf(*id).sequences().Get(*id, identity_);
    if (!info.ok()) return info.status();
    sequence_ = *id;
    shape_ = info->shape;
  } else if (!message.sequence_id().empty()) {
    return absl::InvalidArgumentError(
        "sequence_id: is set, but this is not the first message of the stream");
  }
  if (message.rows() == 0) return absl::InvalidArgumentError("rows: 0; at least 1 is needed");
  request->append_only = true;
  request->layer = message.layer();
  request->dtype = shape_.dtype;
  request->num_heads = request->num_kv_heads = shape_.num_kv_heads;
  request->head_dim = shape_.head_dim;
  SpanShape& span = request->spans.emplace_back();
  span.kv_rows = message.rows();
  span.sequence_id = sequence_->ToBytes();
  if (message.has_expected_length()) span.expected_length = message.expected_length();
  return ToLayout(message.layout(), &request->layout);
}

absl::Status LoadChunks::Finish(v1::LoadSequenceResponse* response) const {
  if (!sequence_.has_value()) {
    return absl::InvalidArgumentError("the stream had no message: nothing names a sequence");
  }
  const absl::StatusOr<SequenceInfo> info =
      fleet_->EngineOf(*sequence_).sequences().Get(*sequence_, identity_);
  if (info.ok()) {
    *response->mutable_sequence() = ToSequenceInfo(*info, fleet_->DeviceIdOf(*sequence_));
  }
  return info.status();
}

}  // namespace flashcore::server
