// Watches the files with the server's certificates and tokens.
#ifndef FLASHCORE_SERVER_ACCESS_CREDENTIAL_FILES_H_
#define FLASHCORE_SERVER_ACCESS_CREDENTIAL_FILES_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/access/tls.h"
#include "server/access/token_file.h"
#include "server/base/clock.h"
#include "server/base/periodic_thread.h"
#include "server/telemetry/credential_file.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// Reads the files once a second and compares what they hold, so that it sees a replacement of any
// kind: a rewritten file, a renamed one, a symbolic link that points elsewhere. Files that cannot
// be used are logged and counted, once for each problem; what was read before stays in use. Owns
// one thread, unless there is no file.
class CredentialFiles {
 public:
  struct Options {
    TlsOptions tls;
    std::string token_file;  // empty: clients need no token
  };

  // Reads the files. INVALID_ARGUMENT names the one that cannot be used. `on_tokens` gets the
  // tokens now, if there is a token file, and, on a thread of this class, each time that they
  // change. `metrics` and `clock` outlive this.
  static absl::StatusOr<std::unique_ptr<CredentialFiles>> Start(
      Options options, Metrics* metrics, const Clock* clock,
      std::function<void(TokenTable)> on_tokens);

  // Makes the next look come at once. Thread-safe.
  void ReloadSoon() {
    if (thread_.has_value()) thread_->CallSoon();
  }

  // The certificates, which change with their files. Null: none are configured.
  std::shared_ptr<const TlsCertificates> certificates() const { return certificates_; }

 private:
  CredentialFiles(Options options, Metrics* metrics, std::function<void(TokenTable)> on_tokens)
      : options_(std::move(options)),
        metrics_(metrics),
        on_tokens_(std::move(on_tokens)),
        tls_report_(&metrics->tls_reload_failures),
        token_report_(&metrics->token_reload_failures) {}

  void Reload();
  // Each reads its files and uses them if they have changed. An error: they cannot be used.
  absl::Status ReadTls();
  absl::Status ReadTokens();

  const Options options_;
  Metrics* const metrics_;
  const std::function<void(TokenTable)> on_tokens_;
  std::shared_ptr<TlsCertificates> certificates_;  // null: no TLS

  // Used by the thread, or by Start.
  TlsMaterial material_;
  std::optional<std::string> tokens_;  // the content of the file; nullopt before the first look
  ReloadReport tls_report_, token_report_;

  std::optional<PeriodicThread> thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_CREDENTIAL_FILES_H_
