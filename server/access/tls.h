// The server's certificates: read from files, checked, and replaced while they are in use.
#ifndef FLASHCORE_SERVER_ACCESS_TLS_H_
#define FLASHCORE_SERVER_ACCESS_TLS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"

namespace flashcore::server {

struct TlsOptions {
  std::string cert_file;  // PEM, the server's certificate first; empty: no TLS
  std::string key_file;   // PEM
  std::string
      client_ca_file;  // PEM; clients must have a certificate of it. Empty: none is asked for
  bool enabled() const { return !cert_file.empty(); }
};

// The content of the files. Made only by Load, so always fit for use.
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

// Thread-safe.
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

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_TLS_H_
