// Makes the Identity of each client.
#ifndef FLASHCORE_SERVER_ACCESS_AUTHENTICATOR_H_
#define FLASHCORE_SERVER_ACCESS_AUTHENTICATOR_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/client_connections.h"
#include "server/access/token_file.h"
#include "server/base/mutex.h"
#include "server/request/identity.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// A call's statements about its client, looked up only as far as needed.
class CallerClaims {
 public:
  using Values = absl::InlinedVector<absl::string_view, 1>;
  enum class CertificateName { kUri, kDns, kCommon };

  virtual ~CallerClaims() = default;
  // All values of a metadata key, in order. They live as long as the call.
  virtual Values Metadata(const char* key) const = 0;
  // The first such name in the client's verified certificate; empty if there is none.
  virtual std::string NameInCertificate(CertificateName kind) const = 0;
};

// A name tells where it is from, so that no source can give a name of another:
//   token:NAME         the bearer token, by the token file
//   cert:NAME          the verified client certificate: its first URI, else its first DNS name,
//                      else its CN. Also of a certificate that a trusted proxy has verified.
//   name:NAME          what the client calls itself, if that is allowed
//   uid:NUMBER         the user of this host who made the connection, if the kernel says; always on
//                      the local socket
//   host:ADDRESS       otherwise the address without its port; every Unix socket is "unix"
// A token that is sent counts, also beside a certificate. Once there are tokens, a client without a
// token and a certificate is refused.
// Thread-safe.
class Authenticator {
 public:
  struct Options {
    bool client_certificates = false;    // clients over TLS have verified ones
    bool insecure_client_names = false;  // believe the metadata `flashcore-client`
    // Serve clients on the local socket whose user the server's user namespace does not know. They
    // all have one uid, and so one identity.
    bool allow_overflow_uid = false;
    // Names of identities that may call for others. Their x-forwarded-client-cert counts: its last
    // element, or, while that names a trusted proxy too, the one before.
    std::vector<std::string> trusted_proxies;
    // Clients need a token or a certificate, also before SetTokens: none is valid then.
    bool needs_tokens = false;
  };

  // `metrics` outlives this.
  Authenticator(Options options, Metrics* metrics)
      : options_(std::move(options)),
        metrics_(metrics),
        tokens_(options_.needs_tokens ? std::make_shared<const TokenTable>() : nullptr) {}

  // Returns the caller that sends from `peer`. UNAUTHENTICATED, counted and logged, unless that is
  // known. INVALID_ARGUMENT if the name that a client gives itself is too long or not printable.
  absl::StatusOr<Identity> Identify(const CallerClaims& claims, const Peer& peer) const;

  // Whether a trusted proxy is at `peer`, as far as the address and the user tell.
  bool TrustsPeer(const Peer& peer) const;

  // Returns the user at the other end of the local socket `connection`. UNAUTHENTICATED, counted
  // and logged, for the overflow uid, unless Options allow it.
  absl::StatusOr<Identity> IdentifyLocal(int connection) const;

  // The tokens from now on; clients need one.
  void SetTokens(TokenTable tokens) ABSL_LOCKS_EXCLUDED(mutex_);

  // UNAUTHENTICATED, counted, if the identity is from a token that is not valid any more, or means
  // another name or other groups by now.
  absl::Status CheckStillValid(const Identity& identity) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Caller {
    const CallerClaims& claims;
    const Peer& peer;
  };

  // Returns the caller, by token, certificate, user or address.
  absl::StatusOr<Identity> Direct(const Caller& caller) const;
  absl::StatusOr<Identity> ByToken(const Caller& caller, absl::string_view header,
                                   const TokenTable& tokens) const;
  absl::StatusOr<Identity> ByCertificate(const Caller& caller) const;
  absl::StatusOr<Identity> ByAddress(const Caller& caller) const;
  // Returns the client that the trusted proxy `proxy` calls for; the proxy itself if it does not
  // say.
  absl::StatusOr<Identity> Forwarded(const Caller& caller, Identity proxy) const;
  bool Trusts(absl::string_view name) const;
  // Counts and logs, and returns UNAUTHENTICATED.
  absl::Status Refuse(const Caller& caller, Unauthenticated reason, absl::string_view error) const {
    return RefusePeer(caller.peer.address, reason, error);
  }
  absl::Status RefusePeer(absl::string_view peer, Unauthenticated reason,
                          absl::string_view error) const;
  std::shared_ptr<const TokenTable> tokens() const ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  Metrics* const metrics_;
  mutable Mutex mutex_;
  std::shared_ptr<const TokenTable> tokens_ ABSL_GUARDED_BY(mutex_);  // null: none are needed
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_AUTHENTICATOR_H_
