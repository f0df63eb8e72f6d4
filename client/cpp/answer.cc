#include "client/cpp/answer.h"

#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/status.h"
#include "proto/grpc/message_view.h"

namespace flashcore::client {
namespace {

// Most bytes of a reply without tensors and sequence_lengths: request_id, timing, status message.
constexpr size_t kMaxSmallBytes = 64 * 1024;
constexpr size_t kMaxLengthBytes = 11;  // of one of sequence_lengths

}  // namespace

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

absl::StatusOr<Answer> ParseAnswer(const grpc::ByteBuffer& message, size_t max_spans) {
  std::array<wire::LargeField, 2> large;
  large[0].number = v1::AttendResponse::kOutputFieldNumber;
  large[1].number = v1::AttendResponse::kLseFieldNumber;
  std::string small_bytes;
  const size_t max_small_bytes = kMaxSmallBytes + max_spans * kMaxLengthBytes;
  absl::Status status = wire::SplitMessage(wire::ViewOf(message), max_small_bytes,
                                           absl::MakeSpan(large), &small_bytes);
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
  answer.status = FromMessage(small.status());
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
  const wire::MessageView view = wire::ViewOf(message);
  wire::CopyField(view, answer.output, destination.output.data());
  wire::CopyField(view, answer.lse, destination.lse.data());
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

}  // namespace flashcore::client
