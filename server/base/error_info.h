// Why a call failed, for programs: the ErrorInfo of the contract. An absl::Status carries it from
// where the cause is known to the transport, which sends it.
#ifndef FLASHCORE_SERVER_BASE_ERROR_INFO_H_
#define FLASHCORE_SERVER_BASE_ERROR_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

// The contract's table of reasons says what each means and which metadata it has.
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

struct ErrorField {
  ErrorField(absl::string_view k, absl::string_view v) : key(k), value(v) {}
  ErrorField(absl::string_view k, uint64_t v) : key(k), value(absl::StrCat(v)) {}

  std::string key, value;  // without newlines; `key` without '='
};

struct ErrorInfo {
  std::string reason;
  std::vector<ErrorField> metadata;
};

// `status`, which is not OK, with this info in place of what it has.
absl::Status WithInfo(absl::Status status, absl::string_view reason,
                      const std::vector<ErrorField>& metadata = {});

// The info that `status` carries, if any.
std::optional<ErrorInfo> InfoOf(const absl::Status& status);

// `status`, which is not OK, with another message.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_ERROR_INFO_H_
