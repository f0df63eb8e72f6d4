// Statuses of messages. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_STATUS_H_
#define FLASHCORE_CLIENT_CPP_STATUS_H_

#include <string>

#include "absl/status/status.h"

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

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_STATUS_H_
