// TLS and the bearer token of a connection. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_SECURITY_H_
#define FLASHCORE_CLIENT_CPP_SECURITY_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "flashcore/options.h"
#include "grpcpp/security/credentials.h"

namespace flashcore::client {

// Whether what is sent to `target` in clear text stays on this host: a Unix socket, or loopback
// addresses only.
bool StaysOnHost(absl::string_view target);

// Whether connections may go through a proxy of the environment: only if that was asked for, with
// TLS, and not to an address of this host.
bool UsesHttpProxy(absl::string_view target, const ClientOptions& options);

// INVALID_ARGUMENT names the file that is missing, too large or no PEM. Certificates are read again
// every few seconds, for new connections.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeTlsCredentials(const TlsOptions& tls);

// The token in the first line of a file. Thread-safe.
class TokenFile {
 public:
  using Clock = std::function<absl::Time()>;  // for tests to replace

  // INVALID_ARGUMENT if there is no token in the file.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(std::string path, Clock now = &absl::Now);

  // Reads the file again, at most once a second. If it cannot be used any more, the token stays as
  // it was.
  std::string Token() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  TokenFile(std::string path, std::string token, Clock now)
      : path_(std::move(path)), now_(std::move(now)), token_(std::move(token)), read_(now_()) {}

  const std::string path_;
  const Clock now_;
  absl::Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);
  absl::Time read_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_SECURITY_H_
