#include "client/cpp/retry.h"

#include <algorithm>

#include "absl/random/random.h"

namespace flashcore::client {

std::optional<absl::Duration> NextBackoff(const RetryPolicy& policy, const absl::Status& status,
                                          bool safe_to_repeat, int attempts, absl::Time now,
                                          absl::Time deadline, absl::BitGenRef random) {
  if (!absl::IsUnavailable(status) || !safe_to_repeat || attempts >= policy.max_attempts) {
    return std::nullopt;
  }
  absl::Duration ceiling = policy.initial_backoff;
  for (int i = 1; i < attempts && ceiling < policy.max_backoff; ++i) ceiling *= 2;
  ceiling = std::min(ceiling, policy.max_backoff);
  // Jitter, so that clients that failed together do not come back together.
  const absl::Duration wait = ceiling * absl::Uniform(random, 0.5, 1.0);
  if (now + wait >= deadline) return std::nullopt;
  return wait;
}

}  // namespace flashcore::client
