// Statuses of messages. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_STATUS_H_
#define FLASHCORE_CLIENT_CPP_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

// How the message of an UNAVAILABLE call begins that reached no server: gRPC's words, and the local
// socket's.
inline constexpr char kNotConnected[] = "failed to connect";
inline constexpr char kNotResolved[] = "DNS resolution failed";

// The message of a DEADLINE_EXCEEDED that the client itself found. Connection::ExplainDeadline says
// more.
inline constexpr char kNoAnswer[] = "the server did not answer before the deadline";

// `message.code` can be any number. absl::StatusCode has the codes of gRPC; others become UNKNOWN.
// An empty text is replaced. Details become payloads, for GetErrorInfo.
inline absl::Status FromMessage(const v1::Status& message) {
  if (message.code() == 0) return absl::OkStatus();
  const bool known = message.code() >= static_cast<int>(absl::StatusCode::kCancelled) &&
                     message.code() <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  absl::Status status(
      known ? static_cast<absl::StatusCode>(message.code()) : absl::StatusCode::kUnknown,
      message.message().empty() ? "the server gave no message" : message.message());
  for (const v1::StatusDetail& detail : message.details()) {
    status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return status;
}

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_STATUS_H_
