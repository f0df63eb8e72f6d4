// Why a call failed, for programs: what tells causes of one status code apart.
#ifndef FLASHCORE_ERROR_INFO_H_
#define FLASHCORE_ERROR_INFO_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace flashcore {

struct ErrorInfo {
  std::string reason;                           // e.g. "KV_FULL"; see ErrorInfo in attention.proto
  std::map<std::string, std::string> metadata;  // by reason, e.g. "free_bytes"
};

// The server's, over either transport, of a call, of a request of an AttendStream or of an
// operation of ManageSequences. Empty if the status has none: OK, an error of this library, or one
// whose code says enough.
ErrorInfo GetErrorInfo(const absl::Status& status);

}  // namespace flashcore

#endif  // FLASHCORE_ERROR_INFO_H_
