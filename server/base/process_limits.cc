#include "server/base/process_limits.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/cgroup.h"

namespace flashcore::server {
namespace {

constexpr rlim_t kStackBytes = rlim_t{1} << 20;

struct Limit {
  __rlimit_resource resource;
  const char* name;
};
constexpr Limit kThreads = {RLIMIT_NPROC, "RLIMIT_NPROC (ulimit -u, all threads of the user)"};
constexpr Limit kAddressSpace = {RLIMIT_AS, "RLIMIT_AS (ulimit -v)"};
constexpr Limit kData = {RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)"};

// "NAME is SIZE"; empty if the process has no such limit.
std::string Describe(const Limit& limit) {
  rlimit value;
  if (getrlimit(limit.resource, &value) != 0 || value.rlim_cur == RLIM_INFINITY) return "";
  return absl::StrCat(limit.name, " is ", value.rlim_cur);
}

// Raises the soft limit to the hard one and returns that.
rlim_t Raise(__rlimit_resource resource) {
  rlimit limit;
  if (getrlimit(resource, &limit) != 0) return RLIM_INFINITY;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(resource, &limit);
  return limit.rlim_max;
}

}  // namespace

std::string WhyNoThread(int error) {
  std::string group = FullPidsGroup();
  if (!group.empty()) return group;
  std::vector<std::string> limits = {Describe(kAddressSpace), Describe(kData)};
  // The machine's root is exempt from that of threads.
  if (geteuid() != 0) limits.push_back(Describe(kThreads));
  limits.erase(std::remove(limits.begin(), limits.end(), ""), limits.end());
  if (limits.empty()) return absl::StrCat("the system says: ", std::strerror(error));
  return absl::StrJoin(limits, ", ");
}

absl::Status RaiseLimits(uint64_t files) {
  signal(SIGXFSZ, SIG_IGN);
  if (const rlim_t most = Raise(RLIMIT_NOFILE); most < files) {
    return absl::InvalidArgumentError(absl::StrCat("RLIMIT_NOFILE (ulimit -Hn) is ", most,
                                                   "; the server needs at least ", files,
                                                   " open files"));
  }
  if (const rlim_t most = Raise(RLIMIT_STACK); most < kStackBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "RLIMIT_STACK (ulimit -Hs) is ", most, " bytes; the server needs at least ", kStackBytes));
  }
  return absl::OkStatus();
}

}  // namespace flashcore::server
