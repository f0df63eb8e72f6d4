// The bearer token of --metrics_token_file.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRICS_TOKEN_H_
#define FLASHCORE_SERVER_TELEMETRY_METRICS_TOKEN_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/telemetry/credential_file.h"

namespace flashcore::server {

// The first line of the file. Not thread-safe.
class MetricsToken {
 public:
  // INVALID_ARGUMENT if the file has no token. `failures` counts the later problems with it, and
  // outlives this; null: nobody does.
  static absl::StatusOr<std::unique_ptr<MetricsToken>> Open(const std::string& path,
                                                            Counter* failures);

  // Whether `sent` is the token. Reads the file first, so that it can be replaced; while it cannot
  // be used, the token before stays in use.
  bool Is(absl::string_view sent);

 private:
  MetricsToken(const std::string& path, Counter* failures)
      : file_{"--metrics_token_file", path}, report_(failures) {}
  absl::Status Read();

  const CredentialFile file_;
  ReloadReport report_;
  std::string token_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRICS_TOKEN_H_
