// Watches the files with the server's certificates and tokens.
#ifndef FLASHCORE_SERVER_TRANSPORT_ACCESS_CREDENTIAL_FILES_H_
#define FLASHCORE_SERVER_TRANSPORT_ACCESS_CREDENTIAL_FILES_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/periodic_thread.h"
#include "server/telemetry/metrics.h"
#include "server/transport/access/tls.h"
#include "server/transport/access/token_file.h"

namespace flashcore::server {

// The whole file. INVALID_ARGUMENT, with the path and the reason, if it cannot be read or has more
// than 1 MiB.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

// Reads the files once a second and compares what they hold, so that it sees a replacement of any
// kind: a rewritten file, a renamed one, a symbolic link that points elsewhere. Files that cannot
// be used are logged and counted, once for each content; what was read before stays in use. Owns
// one thread, unless there is no file.
class CredentialFiles {
 public:
  struct Options {
    TlsOptions tls;
    std::string token_file;  // empty: callers need no token
  };

  // Reads the files. INVALID_ARGUMENT names the one that cannot be used. `on_tokens` gets the
  // tokens now and, on a thread of this class, each time that they change. `metrics` and `clock`
  // outlive this.
  static absl::StatusOr<std::unique_ptr<CredentialFiles>> Start(
      Options options, Metrics* metrics, const Clock* clock,
      std::function<void(TokenTable)> on_tokens);

  // For one address that clients connect to. Null, plaintext, for "unix:path" or without a
  // certificate.
  // This must outlive the gRPC server. Not thread-safe.
  std::shared_ptr<grpc::ServerCredentials> CredentialsFor(const std::string& address);

 private:
  CredentialFiles(Options options, Metrics* metrics, std::function<void(TokenTable)> on_tokens)
      : options_(std::move(options)), metrics_(metrics), on_tokens_(std::move(on_tokens)) {}

  void Reload();
  // Each reads its files and uses them if they have changed. An error: they cannot be used.
  absl::Status ReadTls();
  absl::Status ReadTokens();
  // Logs and counts `status`, unless it is as at the last time.
  static void Report(const char* what, const absl::Status& status, std::string* last,
                     Counter* failures);

  const Options options_;
  Metrics* const metrics_;
  const std::function<void(TokenTable)> on_tokens_;
  std::shared_ptr<TlsCertificates> certificates_;  // null: no TLS
  std::vector<std::shared_ptr<grpc::ServerCredentials>> given_;

  // Of the thread, or of Start.
  TlsMaterial material_;
  std::string tokens_;                   // the content of the file
  std::string tls_error_, token_error_;  // at the last look; empty: none

  std::optional<PeriodicThread> thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ACCESS_CREDENTIAL_FILES_H_
