// How a call of the local socket ended. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_STATUS_H_
#define FLASHCORE_CLIENT_LOCAL_STATUS_H_

#include <cstring>
#include <string>
#include <string_view>

#include "client/local/fields.h"

namespace flashcore::client::local {

enum Code {  // of gRPC, as far as the clients give them
  kOk = 0,
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

struct Status {
  int code = kOk;
  std::string message;
  std::string encoded;  // as a v1::Status, with its details, if a server gave it; else empty

  bool ok() const { return code == kOk; }
};

// "CALL: REASON", for errno.
inline Status SystemError(int code, const std::string& call, int number) {
  return {code, call + ": " + std::strerror(number), ""};
}

// DEADLINE_EXCEEDED that this side finds: before the request was sent, and after.
inline Status TooLate() {
  return {kDeadlineExceeded, "the deadline passed before the request was sent", ""};
}
inline constexpr char kNoReply[] = "the server did not answer in time";

// Decodes a v1::Status.
inline Status DecodeStatus(std::string_view encoded) {
  constexpr uint32_t kCode = 1, kMessage = 2;
  Status status;
  Reader reader(encoded);
  while (reader.Next()) {
    if (reader.field() == kCode) status.code = static_cast<int>(reader.number());
    if (reader.field() == kMessage) status.message = std::string(reader.bytes());
  }
  if (!status.ok() && status.message.empty()) status.message = "the server gave no message";
  if (!status.ok()) status.encoded = std::string(encoded);
  return status;
}

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_STATUS_H_
