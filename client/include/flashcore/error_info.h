// Why a call failed, for programs.
#ifndef FLASHCORE_ERROR_INFO_H_
#define FLASHCORE_ERROR_INFO_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace flashcore {

// The ErrorInfo of flashcore/v1/attention.proto, which has the table of reasons.
struct ErrorInfo {
  std::string reason;  // for example "KV_FULL"; empty: the server gave none
  std::map<std::string, std::string> metadata;
};

// That of the status of a failed call, from any transport.
ErrorInfo GetErrorInfo(const absl::Status& status);

}  // namespace flashcore

#endif  // FLASHCORE_ERROR_INFO_H_
