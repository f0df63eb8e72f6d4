// ManageSequences: many operations on sequences in one RPC.
#include <cstddef>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"
#include "server/transport/rpc/attention_methods.h"
#include "server/transport/rpc/convert.h"

namespace flashcore::server {
namespace {

// The id of the sequence that the operation is on; empty: none.
absl::string_view SequenceOf(const v1::SequenceOperation& operation) {
  switch (operation.operation_case()) {
    case v1::SequenceOperation::kFork:
      return operation.fork().sequence_id();
    case v1::SequenceOperation::kTruncate:
      return operation.truncate().sequence_id();
    case v1::SequenceOperation::kDelete:
      return operation.delete_().sequence_id();
    case v1::SequenceOperation::kGet:
      return operation.get().sequence_id();
    case v1::SequenceOperation::kCreate:
    case v1::SequenceOperation::OPERATION_NOT_SET:
      break;
  }
  return "";
}

// As a request that fails.
void CountFailure(const Identity& client, const absl::Status& status, Metrics* metrics) {
  metrics->CountRejected(status);
  static LogLimiter limiter(20);
  if (const auto pass = limiter.Admit()) {
    LogWarning("operation failed", {{"method", "ManageSequences"},
                                    {"client", client.name},
                                    {"code", absl::StatusCodeToString(status.code())},
                                    {"error", status.message()},
                                    {"suppressed", pass.suppressed}});
  }
}

}  // namespace

absl::Status AttentionMethods::RunOperation(const Identity& client,
                                            const v1::SequenceOperation& operation,
                                            v1::SequenceResult* result) const {
  const auto run = [&](auto method, const auto& request, auto response) {
    absl::Status status = (this->*method)(client, request, &response);
    if (status.ok()) *result->mutable_sequence() = std::move(*response.mutable_sequence());
    return status;
  };
  switch (operation.operation_case()) {
    case v1::SequenceOperation::kCreate:
      return run(&AttentionMethods::CreateSequence, operation.create(),
                 v1::CreateSequenceResponse());
    case v1::SequenceOperation::kFork:
      return run(&AttentionMethods::ForkSequence, operation.fork(), v1::ForkSequenceResponse());
    case v1::SequenceOperation::kTruncate:
      return run(&AttentionMethods::TruncateSequence, operation.truncate(),
                 v1::TruncateSequenceResponse());
    case v1::SequenceOperation::kDelete: {
      v1::DeleteSequenceResponse nothing;
      return DeleteSequence(client, operation.delete_(), &nothing);
    }
    case v1::SequenceOperation::kGet:
      return run(&AttentionMethods::GetSequence, operation.get(), v1::GetSequenceResponse());
    case v1::SequenceOperation::OPERATION_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("operation: not set");
}

absl::Status AttentionMethods::Operations::Begin() const {
  if (request_.operations_size() > kMaxSequenceOperations) {
    return absl::InvalidArgumentError(absl::StrCat("operations: ", request_.operations_size(),
                                                   "; at most ", kMaxSequenceOperations,
                                                   " are allowed"));
  }
  return absl::OkStatus();
}

void AttentionMethods::Operations::RunNext(const Identity& client) {
  const v1::SequenceOperation& operation = request_.operations(next_++);
  v1::SequenceResult* result = response_.add_results();
  const absl::string_view id = SequenceOf(operation);
  absl::Status status;
  if (failed_.count(id) > 0) {
    status = absl::AbortedError("sequence_id: an earlier operation on this sequence failed");
  } else if (bytes_ >= kMaxInfoBytes) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("results: those before have ", bytes_, " bytes; send this operation again"));
  } else {
    status = methods_.RunOperation(client, operation, result);
  }
  if (!status.ok()) {
    *result->mutable_status() = ToStatus(status);
    if (!id.empty()) failed_.insert(id);
    if (!absl::IsAborted(status)) CountFailure(client, status, methods_.context_->metrics);
  }
  bytes_ += result->ByteSizeLong();
}

absl::Status AttentionMethods::ManageSequences(const Identity& client,
                                               const v1::ManageSequencesRequest& request,
                                               v1::ManageSequencesResponse* response) const {
  Operations operations(this, &request, response);
  absl::Status status = operations.Begin();
  while (status.ok() && !operations.done()) operations.RunNext(client);
  return status;
}

}  // namespace flashcore::server
