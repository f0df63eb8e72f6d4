#include "client/cpp/sequence_calls.h"

#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cpp/encode.h"

namespace flashcore::client {

v1::CreateSequenceRequest CreateMessage(const SequenceOptions& options) {
  v1::CreateSequenceRequest message;
  message.set_num_layers(options.num_layers);
  message.set_num_kv_heads(options.num_kv_heads);
  message.set_head_dim(options.head_dim);
  message.set_dtype(ToProto(options.dtype));
  message.set_kv_dtype(ToProto(options.kv_dtype));
  message.set_pin(options.pin);
  message.set_device_id(options.device_id);
  message.set_shared(options.shared);
  message.set_group(options.group);
  message.set_idle_timeout_seconds(absl::ToDoubleSeconds(options.idle_timeout));
  return message;
}

v1::ForkSequenceRequest ForkMessage(const std::string& parent_id, const ForkOptions& fork) {
  v1::ForkSequenceRequest message;
  message.set_sequence_id(parent_id);
  if (fork.length.has_value()) message.set_length(*fork.length);
  message.set_pin(fork.pin);
  message.set_shared(fork.shared);
  message.set_group(fork.group);
  message.set_idle_timeout_seconds(absl::ToDoubleSeconds(fork.idle_timeout));
  return message;
}

v1::TruncateSequenceRequest TruncateMessage(const std::string& id, uint64_t length,
                                            std::optional<uint64_t> expected_length) {
  v1::TruncateSequenceRequest message;
  message.set_sequence_id(id);
  message.set_length(length);
  if (expected_length.has_value()) message.set_expected_length(*expected_length);
  return message;
}

SequenceOptions OptionsOfFork(SequenceOptions parent, const ForkOptions& fork) {
  parent.pin = fork.pin;
  parent.shared = fork.shared;
  parent.group = fork.group;
  parent.idle_timeout = fork.idle_timeout;
  return parent;
}

std::string RandomAffinity() {
  absl::InsecureBitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

std::string AffinityFor(const Connection& connection, const std::string& wanted) {
  if (connection.lease() != nullptr) return connection.lease()->Affinity(wanted);
  return wanted.empty() ? RandomAffinity() : wanted;
}

absl::StatusOr<std::string> LeaseId(const Connection& connection, const CallOptions& call) {
  if (connection.lease() == nullptr) return std::string();
  connection.lease()->Affinity(call.affinity);
  return connection.lease()->Id(connection.Deadline(call));
}

absl::Status CheckId(absl::string_view id) {
  if (id.size() == Sequence::kIdBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_id: ", id.size(), " bytes; want ", Sequence::kIdBytes));
}

absl::Status CheckReplyId(absl::string_view id) {
  absl::Status status = CheckId(id);
  return status.ok() ? status : absl::InternalError(absl::StrCat("reply: ", status.message()));
}

absl::StatusOr<v1::SequenceInfo> GetInfo(const Connection& connection, absl::string_view id,
                                         const CallOptions& call) {
  v1::GetSequenceRequest request;
  request.set_sequence_id(std::string(id));
  auto response = connection.Call<v1::GetSequenceResponse>(request,
                                                           /*safe_to_repeat=*/true, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_sequence());
}

absl::Status DeleteOutcome(const absl::Status& result, int attempts) {
  return absl::IsNotFound(result) && attempts > 1 ? absl::OkStatus() : result;
}

absl::StatusOr<v1::SequenceInfo> TruncateOutcome(const Connection& connection,
                                                 const v1::TruncateSequenceRequest& request,
                                                 absl::StatusOr<v1::SequenceInfo> result,
                                                 int attempts, const CallOptions& call) {
  if (attempts <= 1 || !absl::IsFailedPrecondition(result.status())) return result;
  absl::StatusOr<v1::SequenceInfo> after = GetInfo(connection, request.sequence_id(), call);
  const bool is_done =
      after.ok() && after->layer_lengths_size() > 0 && after->layer_lengths(0) == request.length();
  return is_done ? after : result;
}

}  // namespace flashcore::client
