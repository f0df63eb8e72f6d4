#include "client/cpp/target.h"

#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/wire/host_port.h"

namespace flashcore::client {
namespace {

// The error; empty if there is none.
std::string PathProblem(absl::string_view path) {
  constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;
  const bool uri = absl::ConsumePrefix(&path, "//");  // unix:///path
  if (path.empty()) return "no path";
  if (uri && path[0] != '/') return "the path is not absolute";
  // gRPC reads %20 as one byte.
  const size_t bytes = path.size() - 2 * std::count(path.begin(), path.end(), '%');
  if (bytes <= kMaxPathBytes) return "";
  return absl::StrCat("the path has ", bytes, " bytes, and a Unix socket's at most ",
                      kMaxPathBytes);
}

std::string HostPortProblem(absl::string_view address) {
  if (absl::StrContains(address, '/')) return "a '/' in it";
  const std::optional<HostPort> parsed = ParseHostPort(address);
  if (!parsed.has_value() || parsed->host.empty() || parsed->port == 0) {
    return "no host, an IPv6 host without brackets, no port, or a port that is not from 1 to 65535";
  }
  return "";
}

std::string Problem(absl::string_view target) {
  if (target.empty()) return "empty";
  if (!std::all_of(target.begin(), target.end(), absl::ascii_isgraph)) {
    return "a space, a control character or other than ASCII in it";
  }
  if (absl::ConsumePrefix(&target, "unix:")) return PathProblem(target);
  for (const absl::string_view scheme : {"unix-abstract:", "xds:"}) {
    if (absl::ConsumePrefix(&target, scheme)) return target.empty() ? "no name" : "";
  }
  for (const absl::string_view scheme : {"ipv4:", "ipv6:"}) {
    if (!absl::ConsumePrefix(&target, scheme)) continue;
    for (const absl::string_view address : absl::StrSplit(target, ',')) {
      std::string problem = HostPortProblem(address);
      if (!problem.empty()) return problem;
    }
    return "";
  }
  if (absl::ConsumePrefix(&target, "dns:")) {
    if (absl::ConsumePrefix(&target, "//")) {  // dns://authority/host:port
      const size_t slash = target.find('/');
      target = slash == absl::string_view::npos ? "" : target.substr(slash + 1);
    }
    return HostPortProblem(target);
  }
  const size_t scheme = target.find("://");
  if (scheme != absl::string_view::npos) {
    return absl::StrCat("a scheme: leave ", target.substr(0, scheme), ":// away");
  }
  return HostPortProblem(target);
}

}  // namespace

absl::Status CheckTarget(absl::string_view target) {
  const std::string problem = Problem(target);
  if (problem.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("target '", target, "': ", problem,
                                                 "; want host:port, unix:path or local:path"));
}

}  // namespace flashcore::client
