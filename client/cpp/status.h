// Statuses of messages. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_STATUS_H_
#define FLASHCORE_CLIENT_CPP_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

// Of DEADLINE_EXCEEDED that the client itself found. Connection::ExplainDeadline says more.
inline constexpr char kNoAnswer[] = "the server did not answer before the deadline";

// `code` can be any number. absl::StatusCode has the codes of gRPC; others become UNKNOWN. An empty
// message is replaced.
inline absl::Status FromCode(int code, const std::string& message) {
  if (code == 0) return absl::OkStatus();
  const bool known = code >= static_cast<int>(absl::StatusCode::kCancelled) &&
                     code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      message.empty() ? "the server gave no message" : message);
}

// The payload of a status that GetErrorInfo reads.
inline constexpr char kErrorInfoType[] = "type.googleapis.com/google.rpc.ErrorInfo";

inline void SetDetails(const v1::Status& message, absl::Status* status) {
  for (const v1::StatusDetail& detail : message.details()) {
    if (detail.type_url() == kErrorInfoType) {
      status->SetPayload(kErrorInfoType, absl::Cord(detail.value()));
    }
  }
}

// With the details of the message.
inline absl::Status FromStatus(const v1::Status& message) {
  absl::Status status = FromCode(message.code(), message.message());
  SetDetails(message, &status);
  return status;
}

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_STATUS_H_
