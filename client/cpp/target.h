// The address of a server. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_TARGET_H_
#define FLASHCORE_CLIENT_CPP_TARGET_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace flashcore::client {

// INVALID_ARGUMENT unless `target` is "host:port", "unix:path" or a gRPC target URI. gRPC would
// look up other text as a name, and take port 443 where there is none.
absl::Status CheckTarget(absl::string_view target);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_TARGET_H_
