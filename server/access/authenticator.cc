#include "server/access/authenticator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "server/access/forwarded_client.h"
#include "server/access/peer_user.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

constexpr char kNameKey[] = "flashcore-client";
constexpr char kForwardedKey[] = "x-forwarded-client-cert";
constexpr size_t kMaxNameBytes = 64;  // of the metadata flashcore-client
constexpr size_t kMaxCertificateNameBytes = 512;

// The values of a metadata key with commas between them, as HTTP joins header lines.
std::string Joined(const CallerClaims::Values& values) { return absl::StrJoin(values, ","); }

bool CanBeName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxCertificateNameBytes &&
         std::none_of(name.begin(), name.end(),
                      [](unsigned char c) { return absl::ascii_iscntrl(c); });
}

bool IsUnix(absl::string_view address) { return absl::StartsWith(address, "unix"); }

// "10.0.0.1" of the address "ipv4:10.0.0.1:4711", "[::1]" of "ipv6:%5B::1%5D:4711".
std::string Host(absl::string_view address) {
  if (IsUnix(address)) return "unix";
  absl::string_view host = address.substr(0, address.rfind(':'));
  if (!absl::ConsumePrefix(&host, "ipv4:")) absl::ConsumePrefix(&host, "ipv6:");
  return absl::StrReplaceAll(host, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
}

std::string HostName(const Peer& peer) { return absl::StrCat("host:", Host(peer.address)); }

std::string UserName(uid_t user) { return absl::StrCat("uid:", user); }

}  // namespace

absl::StatusOr<Identity> Authenticator::Identify(const CallerClaims& claims,
                                                 const Peer& peer) const {
  const Caller caller{claims, peer};
  absl::StatusOr<Identity> identity = Direct(caller);
  if (!identity.ok() || !Trusts(identity->name)) return identity;
  return Forwarded(caller, *std::move(identity));
}

absl::StatusOr<Identity> Authenticator::Direct(const Caller& caller) const {
  const std::shared_ptr<const TokenTable> tokens = this->tokens();
  if (tokens != nullptr) {
    const CallerClaims::Values header = caller.claims.Metadata("authorization");
    if (!header.empty()) return ByToken(caller, Joined(header), *tokens);
  }
  if (options_.client_certificates && !IsUnix(caller.peer.address)) return ByCertificate(caller);
  if (tokens == nullptr) return ByAddress(caller);
  return Refuse(caller, Unauthenticated::kNoToken,
                "authorization: no bearer token; this server asks for one");
}

absl::StatusOr<Identity> Authenticator::ByToken(const Caller& caller, absl::string_view header,
                                                const TokenTable& tokens) const {
  if (!absl::StartsWithIgnoreCase(header, "Bearer ")) {
    return Refuse(caller, Unauthenticated::kBadToken, "authorization: want 'Bearer TOKEN'");
  }
  const absl::string_view token = absl::StripAsciiWhitespace(header.substr(sizeof("Bearer")));
  const TokenTable::Entry* entry = tokens.Find(DigestOf(token));
  if (entry == nullptr) {
    return Refuse(caller, Unauthenticated::kBadToken, "authorization: the token is not valid");
  }
  return Identity{absl::StrCat("token:", entry->name), entry->groups, entry->digest};
}

absl::StatusOr<Identity> Authenticator::ByCertificate(const Caller& caller) const {
  std::string name;
  for (const auto kind : {CallerClaims::CertificateName::kUri, CallerClaims::CertificateName::kDns,
                          CallerClaims::CertificateName::kCommon}) {
    if (name.empty()) name = caller.claims.NameInCertificate(kind);
  }
  if (!CanBeName(name)) {
    return Refuse(caller, Unauthenticated::kBadCertificate,
                  "the client certificate has no URI, DNS name or CN of at most 512 bytes without "
                  "control characters");
  }
  return Identity{absl::StrCat("cert:", name), {}};
}

absl::StatusOr<Identity> Authenticator::ByAddress(const Caller& caller) const {
  Identity identity{HostName(caller.peer), {}};
  // An address that is trusted as a proxy's stays one, whoever runs the proxy.
  if (caller.peer.user.has_value() && !Trusts(identity.name)) {
    identity.name = UserName(*caller.peer.user);
  }
  if (!options_.insecure_client_names) return identity;
  const CallerClaims::Values names = caller.claims.Metadata(kNameKey);
  if (names.empty()) return identity;
  const absl::string_view name = names.front();
  if (name.size() > kMaxNameBytes || !std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return absl::ascii_isprint(c);
      })) {
    return absl::InvalidArgumentError(absl::StrCat("metadata ", kNameKey, ": want at most ",
                                                   kMaxNameBytes, " bytes of printable ASCII"));
  }
  identity.name = absl::StrCat("name:", name);
  return identity;
}

absl::StatusOr<Identity> Authenticator::Forwarded(const Caller& caller, Identity proxy) const {
  const CallerClaims::Values values = caller.claims.Metadata(kForwardedKey);
  if (values.empty()) return proxy;
  const std::string header = Joined(values);
  const auto refuse = [&](absl::string_view error) {
    return Refuse(caller, Unauthenticated::kBadForwardedCert, error);
  };
  const absl::StatusOr<std::vector<ForwardedClient>> clients = ParseForwardedClients(header);
  if (!clients.ok()) return refuse(clients.status().message());
  std::string name;
  for (auto client = clients->rbegin(); client != clients->rend(); ++client) {
    name = absl::StrCat("cert:", client->Name());
    if (!Trusts(name)) break;
  }
  if (!CanBeName(absl::string_view(name).substr(sizeof("cert")))) {
    return refuse(
        "x-forwarded-client-cert: the client has no URI, DNS name or CN of at most 512 bytes "
        "without control characters; does the proxy forward it?");
  }
  return Identity{std::move(name), {}, proxy.token};
}

bool Authenticator::TrustsPeer(const Peer& peer) const {
  return Trusts(HostName(peer)) || (peer.user.has_value() && Trusts(UserName(*peer.user)));
}

bool Authenticator::Trusts(absl::string_view name) const {
  const std::vector<std::string>& proxies = options_.trusted_proxies;
  return std::find(proxies.begin(), proxies.end(), name) != proxies.end();
}

absl::StatusOr<Identity> Authenticator::IdentifyLocal(int connection) const {
  const std::optional<uid_t> user = UnixPeerUser(connection);
  if (!user.has_value()) {
    return absl::InternalError("the kernel does not say which user has connected");
  }
  std::string name = UserName(*user);
  if (*user != OverflowUid() || options_.allow_overflow_uid) {
    return Identity{std::move(name), {}};
  }
  return RefusePeer(name, Unauthenticated::kOverflowUid,
                    absl::StrCat("the server cannot tell which user this is: its user namespace "
                                 "maps the process's uid to the overflow uid, ",
                                 *user, ", and --local_allow_overflow_uid is not set"));
}

absl::Status Authenticator::RefusePeer(absl::string_view peer, Unauthenticated reason,
                                       absl::string_view error) const {
  metrics_->CountUnauthenticated(reason);
  static LogLimiter limiter(10);
  if (const auto pass = limiter.Admit()) {
    LogWarning("caller refused",
               {{"peer", peer}, {"error", error}, {"suppressed", pass.suppressed}});
  }
  return absl::UnauthenticatedError(error);
}

void Authenticator::SetTokens(TokenTable tokens) {
  auto next = std::make_shared<const TokenTable>(std::move(tokens));
  MutexLock lock(&mutex_);
  tokens_.swap(next);
}

absl::Status Authenticator::CheckStillValid(const Identity& identity) const {
  const std::shared_ptr<const TokenTable> tokens = this->tokens();
  if (tokens == nullptr || identity.token == TokenDigest()) return absl::OkStatus();
  const TokenTable::Entry* entry = tokens->Find(identity.token);
  // The identity behind a proxy has the proxy's token and another name.
  const bool same =
      entry != nullptr &&
      (absl::StartsWith(identity.name, "cert:") ||
       (identity.name == absl::StrCat("token:", entry->name) && identity.groups == entry->groups));
  if (same) return absl::OkStatus();
  metrics_->CountUnauthenticated(Unauthenticated::kRevoked);
  static LogLimiter limiter(10);
  if (const auto pass = limiter.Admit()) {
    LogWarning("stream ended: its token was revoked",
               {{"identity", identity.name}, {"suppressed", pass.suppressed}});
  }
  return absl::UnauthenticatedError("authorization: the token was revoked");
}

std::shared_ptr<const TokenTable> Authenticator::tokens() const {
  MutexLock lock(&mutex_);
  return tokens_;
}

}  // namespace flashcore::server
