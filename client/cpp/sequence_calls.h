// Code that the calls on one sequence and Client::ManageSequences share. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_SEQUENCE_CALLS_H_
#define FLASHCORE_CLIENT_CPP_SEQUENCE_CALLS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/connection.h"
#include "client/cpp/lease.h"
#include "flashcore/options.h"
#include "flashcore/sequence.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

v1::CreateSequenceRequest CreateMessage(const SequenceOptions& options);
v1::ForkSequenceRequest ForkMessage(const std::string& parent_id, const ForkOptions& fork);
v1::TruncateSequenceRequest TruncateMessage(const std::string& id, uint64_t length,
                                            std::optional<uint64_t> expected_length);

SequenceOptions OptionsOfFork(SequenceOptions parent, const ForkOptions& fork);
std::string RandomAffinity();
// The affinity of a sequence that should have `wanted`; if that is empty, a random one or that of
// the client's lease.
std::string AffinityFor(const Connection& connection, const std::string& wanted);

// The id of the client's lease, for a call that makes sequences; empty without
// ClientOptions::lease.
absl::StatusOr<std::string> LeaseId(const Connection& connection, const CallOptions& call);

// Calls `run` with LeaseId; once more if the lease had ended. `run` makes one sequence, and returns
// an absl::StatusOr.
template <typename Run>
auto WithLease(const Connection& connection, const CallOptions& call, const Run& run) {
  for (bool again = false;; again = true) {
    const absl::StatusOr<std::string> id = LeaseId(connection, call);
    if (!id.ok()) return decltype(run(*id))(id.status());
    auto result = run(*id);
    if (!IsLeaseLost(result.status())) return result;
    connection.lease()->Forget(*id);
    if (again) return result;
  }
}

// INVALID_ARGUMENT unless it has Sequence::kIdBytes; INTERNAL for that of a reply.
absl::Status CheckId(absl::string_view id);
absl::Status CheckReplyId(absl::string_view id);

absl::StatusOr<v1::SequenceInfo> GetInfo(const Connection& connection, absl::string_view id,
                                         const CallOptions& call);

// The meaning of `result` after `attempts` attempts, an earlier one of which may have taken effect.
absl::Status DeleteOutcome(const absl::Status& result, int attempts);
absl::StatusOr<v1::SequenceInfo> TruncateOutcome(const Connection& connection,
                                                 const v1::TruncateSequenceRequest& request,
                                                 absl::StatusOr<v1::SequenceInfo> result,
                                                 int attempts, const CallOptions& call);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_SEQUENCE_CALLS_H_
