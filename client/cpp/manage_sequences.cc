// Client::ManageSequences: many operations on sequences in one call.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cpp/connection.h"
#include "client/cpp/lease.h"
#include "client/cpp/sequence_calls.h"
#include "client/cpp/status.h"
#include "flashcore/client.h"

namespace flashcore {

SequenceOperation SequenceOperation::Create(const SequenceOptions& options) {
  SequenceOperation operation;
  *operation.message_.mutable_create() = client::CreateMessage(options);
  operation.options_ = options;
  return operation;
}

SequenceOperation SequenceOperation::Fork(const Sequence& parent, const ForkOptions& options) {
  SequenceOperation operation(parent);
  *operation.message_.mutable_fork() = client::ForkMessage(parent.id(), options);
  operation.options_ = client::OptionsOfFork(parent.options(), options);
  return operation;
}

SequenceOperation SequenceOperation::Truncate(const Sequence& sequence, uint64_t length,
                                              std::optional<uint64_t> expected_length) {
  SequenceOperation operation(sequence);
  *operation.message_.mutable_truncate() =
      client::TruncateMessage(sequence.id(), length, expected_length);
  return operation;
}

SequenceOperation SequenceOperation::Delete(const Sequence& sequence) {
  SequenceOperation operation(sequence);
  operation.message_.mutable_delete_()->set_sequence_id(sequence.id());
  return operation;
}

SequenceOperation SequenceOperation::Info(const Sequence& sequence) {
  SequenceOperation operation(sequence);
  operation.message_.mutable_get()->set_sequence_id(sequence.id());
  return operation;
}

// The result of an operation that the server answered with `reply`.
SequenceResult SequenceOperation::ToResult(const Sequence::ConnectionPtr& connection,
                                           v1::SequenceResult reply, int attempts,
                                           const CallOptions& call) const {
  absl::StatusOr<v1::SequenceInfo> info = std::move(*reply.mutable_sequence());
  absl::Status status = client::FromMessage(reply.status());
  if (message_.has_delete_()) status = client::DeleteOutcome(status, attempts);
  if (!status.ok()) info = std::move(status);
  if (message_.has_truncate()) {
    info =
        client::TruncateOutcome(*connection, message_.truncate(), std::move(info), attempts, call);
  }
  if (!info.ok()) return {info.status(), {}};
  if (!MakesSequence()) return {*sequence_, *std::move(info)};
  status = client::CheckReplyId(info->sequence_id());
  if (!status.ok()) return {status, {}};
  SequenceOptions options = options_;
  options.device_id = info->device_id();
  options.affinity = call.affinity;
  return {Sequence(connection, info->sequence_id(), options), *std::move(info)};
}

absl::StatusOr<std::vector<SequenceResult>> Client::ManageSequences(
    absl::Span<const SequenceOperation> operations, const CallOptions& call) {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  CallOptions routed = {connection_->Deadline(call), call.affinity};
  v1::ManageSequencesRequest request;
  bool makes = false, creates = false;
  for (const SequenceOperation& operation : operations) {
    *request.add_operations() = operation.message_;
    makes = makes || operation.MakesSequence();
    creates = creates || operation.message_.has_create();
    if (operation.message_.has_delete_()) Sequence(*operation.sequence_).OnLost(nullptr);
    if (routed.affinity.empty()) routed.affinity = operation.options_.affinity;
  }
  if (creates) routed.affinity = client::AffinityFor(*connection_, routed.affinity);
  const absl::StatusOr<std::string> lease_id =
      makes ? client::LeaseId(*connection_, routed) : std::string();
  if (!lease_id.ok()) return lease_id.status();
  for (v1::SequenceOperation& operation : *request.mutable_operations()) {
    if (operation.has_create()) operation.mutable_create()->set_lease_id(*lease_id);
    if (operation.has_fork()) operation.mutable_fork()->set_lease_id(*lease_id);
  }
  int attempts = 0;
  absl::StatusOr<v1::ManageSequencesResponse> response =
      connection_->Call<v1::ManageSequencesResponse>(request,
                                                     /*safe_to_repeat=*/!makes, routed, &attempts);
  if (!response.ok()) return response.status();
  if (response->results_size() != request.operations_size()) {
    return absl::InternalError(absl::StrCat("reply: ", response->results_size(), " results of ",
                                            request.operations_size(), " operations"));
  }
  std::vector<SequenceResult> results;
  results.reserve(operations.size());
  for (const SequenceOperation& operation : operations) {
    v1::SequenceResult& reply = *response->mutable_results(static_cast<int>(results.size()));
    results.push_back(operation.ToResult(connection_, std::move(reply), attempts, routed));
    if (!lease_id->empty() && client::IsLeaseLost(results.back().sequence.status())) {
      connection_->lease()->Forget(*lease_id);
    }
  }
  return results;
}

}  // namespace flashcore
