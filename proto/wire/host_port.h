// The one parser of "host:port", for addresses that the server listens on and the client calls.
#ifndef FLASHCORE_PROTO_WIRE_HOST_PORT_H_
#define FLASHCORE_PROTO_WIRE_HOST_PORT_H_

#include <arpa/inet.h>
#include <netinet/in.h>

#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace flashcore {

struct HostPort {
  absl::string_view host;  // without the brackets of an IPv6 address; may be empty
  int port = 0;            // 0 to 65535
};

// Splits "host:port", "[ipv6]:port" or ":port". None if there is no port, if it is not a number
// from 0 to 65535, or if a host with a colon is not in brackets. Does not look the host up.
inline std::optional<HostPort> ParseHostPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return std::nullopt;
  HostPort parsed;
  parsed.host = address.substr(0, colon);
  if (!absl::SimpleAtoi(address.substr(colon + 1), &parsed.port) || parsed.port < 0 ||
      parsed.port > 65535) {
    return std::nullopt;
  }
  const bool bracketed = absl::ConsumePrefix(&parsed.host, "[");
  if (bracketed ? !absl::ConsumeSuffix(&parsed.host, "]") : absl::StrContains(parsed.host, ':')) {
    return std::nullopt;
  }
  return parsed;
}

// Whether `host` is this host for sure: localhost or an address in numbers that only reaches it.
inline bool IsLoopback(absl::string_view host) {
  if (host == "localhost") return true;
  const std::string text(host);
  in_addr v4;
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace flashcore

#endif  // FLASHCORE_PROTO_WIRE_HOST_PORT_H_
