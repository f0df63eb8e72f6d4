// Statuses and deadlines of client/local as Abseil's. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_CONVERT_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_CONVERT_H_

#include <chrono>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/status.h"
#include "client/local/ring.h"
#include "client/local/status.h"

namespace flashcore::client::local {

// SteadyTime::max() for absl::InfiniteFuture().
inline SteadyTime ToSteady(absl::Time deadline) {
  const absl::Duration left = deadline - absl::Now();
  if (left > absl::Hours(24 * 365)) return SteadyTime::max();
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(left);
}

inline absl::Status ToAbsl(const Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::Status message;
  if (!status.encoded.empty() && message.ParseFromString(status.encoded)) {
    return FromMessage(message);
  }
  return absl::Status(static_cast<absl::StatusCode>(status.code),
                      status.message == kNoReply ? kNoAnswer : status.message);
}

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_CONVERT_H_
