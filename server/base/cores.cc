#include "server/base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/base/cgroup.h"

namespace flashcore::server {
namespace {

// "3" or "3-5", within the range of a cpu_set_t.
bool ParseRange(absl::string_view text, int* first, int* last) {
  const std::vector<absl::string_view> ends = absl::StrSplit(text, '-');
  return ends.size() <= 2 && absl::SimpleAtoi(ends.front(), first) &&
         absl::SimpleAtoi(ends.back(), last) && 0 <= *first && *first <= *last &&
         *last < CPU_SETSIZE;
}

}  // namespace

std::optional<std::vector<int>> ParseCores(absl::string_view list) {
  std::vector<int> cores;
  for (const absl::string_view range : absl::StrSplit(list, ',')) {
    int first = 0;
    int last = 0;
    if (!ParseRange(range, &first, &last)) return std::nullopt;
    for (int core = first; core <= last; ++core) {
      if (std::count(cores.begin(), cores.end(), core) > 0) return std::nullopt;
      cores.push_back(core);
    }
  }
  return cores;
}

std::vector<int> AllowedCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

int UsableCores() {
  const int cores = std::max(1, static_cast<int>(AllowedCores().size()));
  const std::optional<double> cpus = ReadCgroupLimits().cpus;
  if (!cpus.has_value() || *cpus >= cores) return cores;
  return std::max(1, static_cast<int>(std::ceil(*cpus)));
}

absl::Status StayOnCores(absl::Span<const int> cores) {
  if (cores.empty()) return absl::OkStatus();
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cannot restrict the thread to cores ",
                                          absl::StrJoin(cores, ","), ": ", std::strerror(errno)));
}

}  // namespace flashcore::server
