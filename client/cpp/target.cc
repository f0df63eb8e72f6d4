#include "client/cpp/target.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace flashcore::client {

absl::Status CheckTarget(absl::string_view target) {
  const auto error = [target](absl::string_view problem) {
    return absl::InvalidArgumentError(
        absl::StrCat("target '", target, "': ", problem, "; want host:port or unix:path"));
  };
  if (IsUnixTarget(target)) {
    return target.size() > 5 ? absl::OkStatus() : error("no path");
  }
  for (const absl::string_view scheme : {"dns:", "ipv4:", "ipv6:", "unix-abstract:", "xds:"}) {
    if (absl::StartsWith(target, scheme)) return absl::OkStatus();
  }
  const size_t colon = target.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return error("no host or no port");
  const absl::string_view host = target.substr(0, colon);
  if (absl::StrContains(host, ':') && (host.front() != '[' || host.back() != ']')) {
    return error("an IPv6 address must be in brackets");
  }
  if (absl::StrContains(target, '/') || absl::StrContains(target, ' ')) {
    return error("a '/' or a space in it");
  }
  int port = 0;
  if (!absl::SimpleAtoi(target.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return error("port is not a number from 1 to 65535");
  }
  return absl::OkStatus();
}

}  // namespace flashcore::client
