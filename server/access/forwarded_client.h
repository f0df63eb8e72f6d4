// Envoy's header x-forwarded-client-cert: whom a proxy calls for. Knows no gRPC.
#ifndef FLASHCORE_SERVER_ACCESS_FORWARDED_CLIENT_H_
#define FLASHCORE_SERVER_ACCESS_FORWARDED_CLIENT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

// The certificate of a client, as a proxy describes it: one element of the header.
struct ForwardedClient {
  std::vector<std::string> uris;  // subject alternative names
  std::vector<std::string> dns;
  std::string subject;  // RFC 2253: "CN=frontend,O=example"
  std::string hash;     // SHA-256 of the certificate, in hexadecimal

  // The first URI, else the first DNS name, else the subject's CN. Empty if there is none, or if
  // the subject has several CNs.
  std::string Name() const;
};

// Reads a header of elements separated by commas: pairs KEY=VALUE separated by semicolons. A value
// may be in double quotes; \" in it is a quote. Keys are By, Hash, Cert, Chain, Subject, URI and
// DNS, in any case; only By, URI and DNS may occur twice in an element. The last element is of the
// client that called the proxy nearest to us; each proxy on the way has appended one.
// INVALID_ARGUMENT for another form, and beyond 8 KiB or 16 elements.
absl::StatusOr<std::vector<ForwardedClient>> ParseForwardedClients(absl::string_view header);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_FORWARDED_CLIENT_H_
