// Why a call failed, for programs: what a status carries besides its code and text. See ErrorInfo
// in attention.proto.
#ifndef FLASHCORE_SERVER_BASE_ERROR_INFO_H_
#define FLASHCORE_SERVER_BASE_ERROR_INFO_H_

#include <cstddef>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

namespace reason {
inline constexpr char kQueueFull[] = "QUEUE_FULL";
inline constexpr char kStagingFull[] = "STAGING_FULL";
inline constexpr char kKvFull[] = "KV_FULL";
inline constexpr char kQuotaExceeded[] = "QUOTA_EXCEEDED";
inline constexpr char kRepliesFull[] = "REPLIES_FULL";
inline constexpr char kServerFull[] = "SERVER_FULL";
inline constexpr char kTooLarge[] = "TOO_LARGE";
inline constexpr char kSequenceLost[] = "SEQUENCE_LOST";
inline constexpr char kRegionLost[] = "REGION_LOST";
inline constexpr char kLeaseLost[] = "LEASE_LOST";
inline constexpr char kLengthMismatch[] = "LENGTH_MISMATCH";
inline constexpr char kUnknownField[] = "UNKNOWN_FIELD";
}  // namespace reason

// The text of UNAVAILABLE for what a drain refuses or cuts off.
inline constexpr char kDrains[] = "the server drains";

struct ErrorInfo {
  std::string reason;
  std::map<std::string, std::string> metadata;
};

// An entry of the metadata; numbers become decimal. Neither has a line break.
struct ErrorField {
  absl::string_view key;
  absl::AlphaNum value;
};

// `status`, which is not OK, with an ErrorInfo in place of any that it has.
absl::Status WithInfo(absl::Status status, absl::string_view reason,
                      std::initializer_list<ErrorField> metadata = {});

// The ErrorInfo of what no waiting helps.
absl::Status WithTooLarge(absl::Status status, size_t needed_bytes, size_t limit_bytes);

// Nothing if the status has none.
std::optional<ErrorInfo> GetErrorInfo(const absl::Status& status);

// `status` with another text: the same code and ErrorInfo.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_ERROR_INFO_H_
