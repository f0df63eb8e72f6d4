// How long to wait before trying again, and whether to. Pure but for the caller's random bits.
#ifndef FLASHCORE_CLIENT_CPP_RETRY_H_
#define FLASHCORE_CLIENT_CPP_RETRY_H_

#include <optional>

#include "absl/random/bit_gen_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace flashcore {

// Only UNAVAILABLE is tried again, and only what cannot do harm if it takes effect twice:
//   Attend           if AttendRequest::SafeToRepeat: with inline K/V nothing changes on the server;
//                    with expected_length an append that took effect although its answer was lost
//                    shows as FAILED_PRECONDITION
//   sequences        Truncate (with expected_length, likewise), Delete, Info, ListSequences;
//                    CreateSequence, Fork and Append are sent once
//   GetServerInfo    always
// An AttendStream, Echo and CheckHealth never are.
struct RetryPolicy {
  int max_attempts = 4;  // 1: no retries
  // Wait before attempt n + 1: uniform in [1/2, 1] of min(initial * 2^(n-1), max).
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(1);
};

namespace client {

// The wait before the next attempt after `attempts` were made, the last of them at `now` with
// `status`; nothing if it was the last: another status, too many attempts, not safe to repeat, or
// the wait would reach beyond the deadline.
std::optional<absl::Duration> NextBackoff(const RetryPolicy& policy, const absl::Status& status,
                                          bool safe_to_repeat, int attempts, absl::Time now,
                                          absl::Time deadline, absl::BitGenRef random);

}  // namespace client
}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_RETRY_H_
