#include "server/transport/rpc/message.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "flashcore/v1/attention.pb.h"
#include "google/protobuf/arena.h"
#include "google/protobuf/message.h"
#include "google/protobuf/unknown_field_set.h"
#include "server/request/validate.h"
#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/take_spans.h"
#include "server/transport/rpc/unknown_fields.h"

namespace flashcore::server {
namespace {

// Limit on a message's fields other than its tensors: enough for max_spans spans with all fields
// set, and small enough that the generated classes stay small.
constexpr size_t kMaxSmallFieldBytes = 256 << 10;

constexpr size_t kUsualSmallFieldBytes = 2048;  // a request with up to 64 spans

// A message without its tensors. With few spans, it needs no heap memory.
template <typename Message>
class SmallMessage {
 public:
  Message* operator->() { return message_; }
  Message& operator*() { return *message_; }

 private:
  alignas(8) char block_[2048];
  google::protobuf::Arena arena_{block_, sizeof(block_)};
  Message* const message_ = google::protobuf::Arena::CreateMessage<Message>(&arena_);
};

constexpr size_t kMaxHeaderBytes = 20;  // tag and length of a tensor field

absl::Status MalformedFields() {
  return absl::InvalidArgumentError(
      "message: a field other than the tensors is not well-formed protobuf");
}

template <typename Message>
bool HasUnknownFields(const Message& message) {
  static const auto* const kReflection = Message::default_instance().GetReflection();
  return !kReflection->GetUnknownFields(message).empty();
}

// CheckKnownFields of a request whose spans are taken. Its walk over all fields would take half as
// long as parsing them.
absl::Status CheckAttendFields(const v1::AttendRequest& message) {
  const bool any =
      HasUnknownFields(message) || HasUnknownFields(message.mask()) ||
      HasUnknownFields(message.query_range()) || HasUnknownFields(message.key_range()) ||
      HasUnknownFields(message.value_range()) || HasUnknownFields(message.output_range()) ||
      HasUnknownFields(message.lse_range()) || HasUnknownFields(message.inputs_ready()) ||
      HasUnknownFields(message.results_ready());
  return any ? CheckKnownFields(message) : absl::OkStatus();
}

// The fields of a reply that are not tensors.
void FillReply(const AttendOperation& operation, v1::AttendResponse* small) {
  small->set_request_id(operation.request.request_id);
  *small->mutable_timing() = ToTiming(operation.times);
  small->mutable_sequence_lengths()->Add(operation.sequence_lengths.begin(),
                                         operation.sequence_lengths.end());
}

bool SendsOutput(const AttendRequest& request) { return request.ranges[kOutput].region == nullptr; }
bool SendsLse(const AttendRequest& request) {
  return request.return_lse && request.ranges[kLse].region == nullptr;
}

}  // namespace

absl::Status ParseMessage(const wire::MessageView& message, absl::Span<wire::LargeField> tensors,
                          google::protobuf::MessageLite* parsed) {
  std::string small;
  small.reserve(kUsualSmallFieldBytes);
  if (absl::Status status = wire::SplitMessage(message, kMaxSmallFieldBytes, tensors, &small);
      !status.ok()) {
    return status;
  }
  return parsed->ParseFromString(small) ? absl::OkStatus() : MalformedFields();
}

absl::Status ParseAttend(const wire::MessageView& message, const Regions* regions,
                         AttendOperation* operation, TensorFields* tensors, bool* well_formed) {
  *well_formed = false;
  (*tensors)[kQuery].number = v1::AttendRequest::kQueryFieldNumber;
  (*tensors)[kKey].number = v1::AttendRequest::kKeyFieldNumber;
  (*tensors)[kValue].number = v1::AttendRequest::kValueFieldNumber;
  SmallMessage<v1::AttendRequest> parsed;
  std::string small;
  small.reserve(kUsualSmallFieldBytes);
  absl::Status status =
      wire::SplitMessage(message, kMaxSmallFieldBytes, absl::MakeSpan(*tensors), &small);
  if (!status.ok()) return status;
  int unknown_field = 0;
  if (!TakeSpans(&small, &operation->request.spans, &unknown_field) ||
      !parsed->ParseFromString(small)) {
    return MalformedFields();
  }
  *well_formed = true;
  AttendRequest& request = operation->request;
  request.request_id = parsed->request_id();
  const absl::Status points = ToTimelinePoints(*parsed, regions, &request);
  status = unknown_field == 0 ? CheckAttendFields(*parsed)
                              : UnknownField(v1::Span::descriptor()->full_name(), unknown_field);
  if (status.ok()) status = points;
  if (!status.ok()) return status;
  request.query_bytes = (*tensors)[kQuery].size;
  request.key_bytes = (*tensors)[kKey].size;
  request.value_bytes = (*tensors)[kValue].size;
  status = ToRequest(*parsed, &request);
  return status.ok() ? ToMemoryRanges(*parsed, regions, &request) : status;
}

absl::Status ParseSingleAttend(const wire::MessageView& message, const Regions* regions,
                               AttendOperation* operation, TensorFields* tensors) {
  bool well_formed = false;
  absl::Status status = ParseAttend(message, regions, operation, tensors, &well_formed);
  if (!status.ok() || operation->request.timeout_ns == 0) return status;
  return absl::InvalidArgumentError(
      absl::StrCat("timeout_ns: ", operation->request.timeout_ns,
                   "; only requests of AttendStream may have one, others have the deadline of "
                   "their call or slot"));
}

EncodedReply EncodeReply(AttendOperation* operation) {
  const AttendRequest& request = operation->request;
  SmallMessage<v1::AttendResponse> small;
  FillReply(*operation, &*small);
  EncodedReply reply;
  std::string bytes;
  bytes.reserve(small->ByteSizeLong() + kMaxHeaderBytes);
  small->AppendToString(&bytes);
  const size_t lse_offset = operation->tensors.lse_offset();
  reply.staging = operation->tensors.TakeResults();
  const auto add = [&](int number, size_t offset, size_t staged) {
    bytes += wire::FieldHeader(number, staged);
    reply.pieces.push_back({std::exchange(bytes, std::string()), offset, staged});
  };
  if (SendsOutput(request)) {
    add(v1::AttendResponse::kOutputFieldNumber, 0, request.output_bytes());
  }
  if (SendsLse(request)) {
    add(v1::AttendResponse::kLseFieldNumber, lse_offset, request.lse_bytes());
  }
  if (reply.pieces.empty()) reply.pieces.push_back({std::move(bytes)});
  return reply;
}

size_t StagedReplyBytes(const AttendOperation& operation) {
  const AttendRequest& request = operation.request;
  size_t bytes = 0;
  if (SendsOutput(request)) bytes += request.output_bytes();
  if (SendsLse(request)) bytes += request.lse_bytes();
  return bytes;
}

std::string EncodeError(const std::string& request_id, const absl::Status& status) {
  v1::AttendResponse response;
  response.set_request_id(request_id);
  *response.mutable_status() = ToStatus(status);
  return response.SerializeAsString();
}

size_t MaxReplyBytes(const AttendRequest& request) {
  constexpr size_t kVarintBytes = 10;
  constexpr size_t kTimingBytes = 6 * (1 + kVarintBytes);
  size_t bytes = 4 * kMaxHeaderBytes + request.request_id.size() + kTimingBytes +
                 request.spans.size() * kVarintBytes;
  if (SendsOutput(request)) bytes += request.output_bytes();
  if (SendsLse(request)) bytes += request.lse_bytes();
  return bytes;
}

absl::Status CheckReplyFits(const AttendRequest& request, size_t room, const char* place) {
  const size_t bytes = MaxReplyBytes(request);
  if (bytes <= room) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("output: the answer may have ", bytes,
                                                 " bytes, but a ", place, " has room for ", room,
                                                 "; use output_range and lse_range"));
}

void WriteReply(AttendOperation* operation, std::string* out) {
  EncodedReply reply = EncodeReply(operation);
  const char* const staging = reinterpret_cast<const char*>(reply.staging.data());
  *out = std::exchange(reply.pieces.front().bytes, std::string());
  for (const EncodedReply::Piece& piece : reply.pieces) {
    *out += piece.bytes;
    out->append(staging + piece.offset, piece.staged);
  }
}

void WriteError(const std::string& request_id, const absl::Status& status, size_t max_bytes,
                std::string* out) {
  SmallMessage<v1::AttendResponse> response;
  // A longer one was refused.
  if (request_id.size() <= kMaxRequestIdBytes) response->set_request_id(request_id);
  *response->mutable_status() = ToStatus(status);
  v1::Status& sent = *response->mutable_status();
  size_t room = max_bytes - 3 * kMaxHeaderBytes - response->request_id().size();
  const size_t details =
      sent.details().empty() ? 0 : sent.details(0).ByteSizeLong() + kMaxHeaderBytes;
  if (details <= room / 2) {
    room -= details;
  } else {
    sent.clear_details();
  }
  if (sent.message().size() > room) sent.mutable_message()->resize(room);
  response->SerializeToString(out);
}

}  // namespace flashcore::server
