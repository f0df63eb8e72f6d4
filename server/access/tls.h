// The server's certificates: read from files, checked, and replaced while gRPC uses them.
//
// gRPC's own FileWatcherCertificateProvider (1.51) does not check that key and certificate belong
// together. With a pair that does not, which a reader can see in the middle of a replacement, it
// throws the old pair away and every handshake fails. Its older interface asks a callback of ours
// for the certificates before each handshake and keeps those that it has if the new ones are bad.
#ifndef FLASHCORE_SERVER_ACCESS_TLS_H_
#define FLASHCORE_SERVER_ACCESS_TLS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "server/base/mutex.h"

namespace flashcore::server {

struct TlsOptions {
  std::string cert_file;  // PEM, the server's certificate first; empty: no TLS
  std::string key_file;   // PEM
  std::string
      client_ca_file;  // PEM; clients must have a certificate of it. Empty: none is asked for
  bool enabled() const { return !cert_file.empty(); }
};

// What the files hold. Made only by Load, so always fit for use.
struct TlsMaterial {
  std::string cert_chain;
  std::string private_key;
  std::string client_ca;
  absl::Time expiry;  // of the first certificate

  // INVALID_ARGUMENT names the file that is missing, unreadable, no PEM, cut off, a key of another
  // certificate, or refused by OpenSSL, as a short key is. An expired certificate is no error:
  // clients refuse it.
  static absl::StatusOr<TlsMaterial> Load(const TlsOptions& options);
};

// Thread-safe. Credentials refer to it.
class TlsCertificates {
 public:
  explicit TlsCertificates(TlsMaterial material) : material_(std::move(material)) {}

  // For handshakes from now on.
  void Replace(TlsMaterial material) ABSL_LOCKS_EXCLUDED(mutex_);
  // Copies the certificates, if they are newer than `*version`, and updates that. The first version
  // is 1.
  bool Get(uint64_t* version, TlsMaterial* material) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 1;
  TlsMaterial material_ ABSL_GUARDED_BY(mutex_);
};

// Credentials of one address: TLS 1.2 or 1.3 with ALPN h2. Without a client CA, clients are not
// asked for a certificate. gRPC does not keep them alive: they must outlive the server.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(
    std::shared_ptr<const TlsCertificates> certificates);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_TLS_H_
