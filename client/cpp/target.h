// Addresses of servers. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_TARGET_H_
#define FLASHCORE_CLIENT_CPP_TARGET_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace flashcore::client {

// INVALID_ARGUMENT unless `target` is "host:port", "unix:path" or a gRPC target URI.
absl::Status CheckTarget(absl::string_view target);

inline bool IsUnixTarget(absl::string_view target) { return target.substr(0, 5) == "unix:"; }

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_TARGET_H_
