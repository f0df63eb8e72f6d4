#include "client/cpp/codec.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/local/status.h"
#include "flashcore/v1/debug.pb.h"
#include "grpcpp/support/slice.h"

namespace flashcore::client {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "tensors are little-endian in messages, and copied unchanged");

// Most bytes of a reply without tensors and sequence_lengths: request_id, timing, status message.
constexpr size_t kMaxSmallBytes = 64 * 1024;
constexpr size_t kMaxVarintBytes = 10;

void FillMask(const Mask& mask, v1::Mask* out) {
  out->set_kind(mask.kind == Mask::Kind::kNone     ? v1::Mask::KIND_NONE
                : mask.kind == Mask::Kind::kCausal ? v1::Mask::KIND_CAUSAL
                                                   : v1::Mask::KIND_SLIDING_WINDOW);
  if (mask.left.has_value()) out->set_window_left(*mask.left);
  if (mask.right.has_value()) out->set_window_right(*mask.right);
}

// Adds the payload; without a copy if `borrowed` is given.
void AddField(int number, absl::Span<const std::byte> payload, const std::string& before,
              BorrowedMemory* borrowed, std::vector<grpc::Slice>* slices) {
  slices->emplace_back(before + wire::FieldHeader(number, payload.size()));
  if (payload.empty()) return;
  slices->push_back(borrowed != nullptr ? borrowed->Acquire(payload)
                                        : grpc::Slice(payload.data(), payload.size()));
}

// Whether gRPC says that a server took the connection and closed it before HTTP/2 began, as it does
// when it expects TLS and gets plaintext, or the reverse.
bool ClosedWhileConnecting(absl::string_view message) {
  if (!absl::StartsWith(message, "failed to connect to all addresses")) return false;
  for (const char* sign : {"Socket closed", "Connection reset by peer", "Handshake read failed",
                           "wrong version number", "packet length too long"}) {
    if (absl::StrContains(message, sign)) return true;
  }
  return false;
}

}  // namespace

v1::Layout ToProto(Layout layout) {
  return layout == Layout::kNHD ? v1::LAYOUT_NHD : v1::LAYOUT_HND;
}

v1::DType ToProto(DType dtype) {
  return dtype == DType::kFloat16 ? v1::DTYPE_FLOAT16 : v1::DTYPE_BFLOAT16;
}

DType FromProto(v1::DType dtype) {
  return dtype == v1::DTYPE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
}

void SetSmallFields(const AttendRequest& request, v1::AttendRequest* out) {
  out->set_request_id(request.request_id);
  for (const SpanShape& span : request.spans) {
    v1::Span* to = out->add_spans();
    to->set_query_rows(span.query_rows);
    to->set_kv_rows(span.kv_rows);
    to->set_sequence_id(span.sequence_id);
    if (span.expected_length.has_value()) to->set_expected_length(*span.expected_length);
  }
  out->set_dtype(ToProto(request.dtype));
  out->set_num_heads(request.num_heads);
  out->set_num_kv_heads(request.num_kv_heads);
  out->set_head_dim(request.head_dim);
  out->set_layout(ToProto(request.layout));
  if (request.mask.kind != Mask::Kind::kNone || request.mask.left || request.mask.right) {
    FillMask(request.mask, out->mutable_mask());
  }
  if (request.softmax_scale.has_value()) out->set_softmax_scale(*request.softmax_scale);
  out->set_return_lse(!request.lse.empty());
  out->set_layer(request.layer);
}

void SetResult(const v1::AttendResponse& response, AttendResult* result) {
  result->request_id = response.request_id();
  const v1::Timing& timing = response.timing();
  result->timing = {timing.receive_ns(), timing.staging_wait_ns(), timing.queue_ns(),
                    timing.copy_in_ns(), timing.kernel_ns(),       timing.copy_out_ns()};
  result->sequence_lengths.assign(response.sequence_lengths().begin(),
                                  response.sequence_lengths().end());
}

absl::Status CheckSequenceLengths(const std::vector<uint64_t>& lengths,
                                  const std::vector<std::optional<uint64_t>>& want) {
  if (lengths.size() != want.size()) {
    return absl::InternalError(
        absl::StrCat("reply: ", lengths.size(), " sequence_lengths; want ", want.size()));
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (want[i].has_value() && lengths[i] != *want[i]) {
      return absl::InternalError(
          absl::StrCat("reply: sequence_lengths[", i, "] is ", lengths[i], "; want ", *want[i]));
    }
  }
  return absl::OkStatus();
}

void SetDestination(const AttendRequest& request, Destination* out) {
  out->output = request.output;
  out->lse = request.lse;
  out->sequence_lengths.clear();
  const bool resident = std::any_of(request.spans.begin(), request.spans.end(),
                                    [](const SpanShape& s) { return !s.sequence_id.empty(); });
  if (!resident) return;
  for (const SpanShape& span : request.spans) {
    std::optional<uint64_t>& want = out->sequence_lengths.emplace_back();
    if (span.expected_length.has_value()) want = *span.expected_length + span.kv_rows;
    if (span.sequence_id.empty()) want = 0;
  }
}

absl::StatusOr<EncodedRequest> EncodeRequest(const AttendRequest& request, size_t max_message_bytes,
                                             BorrowedMemory* borrowed) {
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  v1::AttendRequest small;
  SetSmallFields(request, &small);
  EncodedRequest encoded;
  SetDestination(request, &encoded.destination);
  const size_t bytes = small.ByteSizeLong() + request.query.size() + request.key.size() +
                       request.value.size() + 3 * kMaxVarintBytes;
  if (bytes > max_message_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("request: about ", bytes,
                                                     " bytes, over this client's limit of ",
                                                     max_message_bytes, " a message"));
  }
  std::vector<grpc::Slice> slices;
  slices.reserve(6);
  AddField(v1::AttendRequest::kQueryFieldNumber, request.query, small.SerializeAsString(), borrowed,
           &slices);
  AddField(v1::AttendRequest::kKeyFieldNumber, request.key, "", borrowed, &slices);
  AddField(v1::AttendRequest::kValueFieldNumber, request.value, "", borrowed, &slices);
  encoded.message = grpc::ByteBuffer(slices.data(), slices.size());
  return encoded;
}

absl::StatusOr<Answer> ParseAnswer(const grpc::ByteBuffer& message, size_t max_spans) {
  std::array<wire::LargeField, 2> large;
  large[0].number = v1::AttendResponse::kOutputFieldNumber;
  large[1].number = v1::AttendResponse::kLseFieldNumber;
  std::string small_bytes;
  const size_t max_small_bytes = kMaxSmallBytes + max_spans * (kMaxVarintBytes + 1);
  absl::Status status =
      wire::SplitMessage(message, max_small_bytes, absl::MakeSpan(large), &small_bytes);
  v1::AttendResponse small;
  if (!status.ok() || !small.ParseFromString(small_bytes)) {
    return absl::InternalError(
        absl::StrCat("reply: not an AttendResponse: ",
                     status.ok() ? "its small fields do not parse" : status.message()));
  }
  Answer answer;
  answer.output = large[0];
  answer.lse = large[1];
  SetResult(small, &answer.result);
  answer.result.response_bytes = message.Length();
  answer.status = FromCode(small.status().code(), small.status().message());
  return answer;
}

absl::Status CopyAnswer(const grpc::ByteBuffer& message, const Answer& answer,
                        const Destination& destination) {
  const size_t lse_bytes = destination.lse.size() * sizeof(float);
  if (answer.output.size != destination.output.size() || answer.lse.size != lse_bytes) {
    return absl::InternalError(absl::StrCat("reply: output has ", answer.output.size,
                                            " bytes and lse ", answer.lse.size, "; want ",
                                            destination.output.size(), " and ", lse_bytes));
  }
  absl::Status status =
      CheckSequenceLengths(answer.result.sequence_lengths, destination.sequence_lengths);
  if (!status.ok()) return status;
  wire::CopyField(message, answer.output, destination.output.data());
  wire::CopyField(message, answer.lse, destination.lse.data());
  return absl::OkStatus();
}

absl::Status TakeReply(const grpc::ByteBuffer& message, const Destination& destination,
                       AttendResult* result) {
  absl::StatusOr<Answer> answer = ParseAnswer(message, destination.sequence_lengths.size());
  if (!answer.ok()) return answer.status();
  absl::Status status = CopyAnswer(message, *answer, destination);
  if (status.ok()) *result = std::move(answer->result);
  return status;
}

EncodedRequest EncodeEcho(const std::string& request_id, absl::Span<const std::byte> payload,
                          absl::Span<std::byte> reply, BorrowedMemory* borrowed) {
  v1::EchoRequest small;
  small.set_reply_bytes(reply.size());
  small.set_request_id(request_id);
  std::vector<grpc::Slice> slices;
  AddField(v1::EchoRequest::kPayloadFieldNumber, payload, small.SerializeAsString(), borrowed,
           &slices);
  EncodedRequest encoded;
  encoded.message = grpc::ByteBuffer(slices.data(), slices.size());
  encoded.destination.output = reply;
  return encoded;
}

absl::StatusOr<Answer> ParseEcho(const grpc::ByteBuffer& message) {
  Answer answer;
  answer.output.number = v1::EchoResponse::kPayloadFieldNumber;
  std::string small_bytes;
  absl::Status status =
      wire::SplitMessage(message, kMaxSmallBytes, absl::MakeSpan(&answer.output, 1), &small_bytes);
  v1::EchoResponse small;
  if (!status.ok() || !small.ParseFromString(small_bytes)) {
    return absl::InternalError(
        absl::StrCat("reply: not an EchoResponse: ",
                     status.ok() ? "its small fields do not parse" : status.message()));
  }
  answer.result.request_id = small.request_id();
  answer.result.response_bytes = message.Length();
  return answer;
}

absl::Status FromGrpc(const grpc::Status& status) {
  std::string message = status.error_message();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE && ClosedWhileConnecting(message)) {
    absl::StrAppend(&message, "; does one side use TLS and the other not?");
  }
  return FromCode(static_cast<int>(status.error_code()), message);
}

}  // namespace flashcore::client
