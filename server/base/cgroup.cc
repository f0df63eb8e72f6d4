#include "server/base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace flashcore::server {
namespace {

// A hierarchy of groups and the group of this process in it. Version 2 has one, version 1 one for
// each set of controllers.
struct Membership {
  std::string controllers;  // "memory" or "cpu,cpuacct"; empty: version 2
  std::string group;        // its path in the hierarchy
};

struct Mount {
  std::string group;   // which group its folder shows
  std::string folder;  // where
  std::string type;    // of the file system
  std::vector<std::string> options;
};

std::vector<std::string> Lines(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(std::move(line));
  return lines;
}

// Lines such as "4:memory:/a/b" and "0::/a/b".
std::vector<Membership> ReadMemberships(const std::string& root) {
  std::vector<Membership> memberships;
  for (const std::string& line : Lines(root + "/proc/self/cgroup")) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() == 3) memberships.push_back({parts[1], parts[2]});
  }
  return memberships;
}

// Lines such as "34 25 0:31 /a /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory".
// A space within a path is \040.
std::vector<Mount> ReadMounts(const std::string& root) {
  std::vector<Mount> mounts;
  for (const std::string& line : Lines(root + "/proc/self/mountinfo")) {
    const std::pair<std::string, std::string> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    const std::vector<std::string> where = absl::StrSplit(halves.first, ' ');
    const std::vector<std::string> what = absl::StrSplit(halves.second, ' ');
    if (where.size() < 5 || what.size() < 3 || !absl::StartsWith(what[0], "cgroup")) continue;
    Mount mount{"", "", what[0], absl::StrSplit(what[2], ',')};
    if (absl::CUnescape(where[3], &mount.group) && absl::CUnescape(where[4], &mount.folder)) {
      mounts.push_back(std::move(mount));
    }
  }
  return mounts;
}

bool Shows(const Mount& mount, const Membership& membership) {
  if (membership.controllers.empty()) return mount.type == "cgroup2";
  const std::string first = membership.controllers.substr(0, membership.controllers.find(','));
  return mount.type == "cgroup" &&
         std::count(mount.options.begin(), mount.options.end(), first) > 0;
}

// The folder of the process's group below that of the mount, such as "/b", or "". A mount that
// shows only another group, as one within a container may, is taken for the process's own.
std::string FolderOf(const Membership& membership, const Mount& mount) {
  absl::string_view group = membership.group;
  if (absl::StrContains(group, "/..")) return "";
  if (mount.group != "/" && !absl::ConsumePrefix(&group, mount.group)) return "";
  return std::string(absl::StripSuffix(group, "/"));
}

// The number that a file begins with. Nullopt if there is no file, or it says "max" or -1.
std::optional<int64_t> ReadNumber(const std::string& path) {
  int64_t number = 0;
  std::ifstream file(path);
  if (!(file >> number) || number < 0) return std::nullopt;
  return number;
}

// Returns the limit that a version 1 group inherits from those above it, even where no mount shows
// them.
std::optional<int64_t> ReadHierarchicalLimit(const std::string& folder) {
  for (absl::string_view line : Lines(folder + "/memory.stat")) {
    int64_t bytes = 0;
    if (absl::ConsumePrefix(&line, "hierarchical_memory_limit ") &&
        absl::SimpleAtoi(line, &bytes)) {
      return bytes;
    }
  }
  return std::nullopt;
}

// Files such as cpu.max with "50000 100000", both in microseconds, or cpu.cfs_quota_us.
std::optional<double> ReadCpus(const std::string& folder) {
  double quota = 0;
  double period = 0;
  std::ifstream file(folder + "/cpu.max");
  if (file >> quota >> period && period > 0) return quota / period;
  const auto old_quota = ReadNumber(folder + "/cpu.cfs_quota_us");
  const auto old_period = ReadNumber(folder + "/cpu.cfs_period_us");
  if (!old_quota || old_period.value_or(0) <= 0) return std::nullopt;
  return static_cast<double>(*old_quota) / static_cast<double>(*old_period);
}

template <typename T>
void Lower(std::optional<T>* limit, std::optional<T> to) {
  if (to.has_value() && to < limit->value_or(*to + 1)) *limit = to;
}

// Whatever of these files a group's folder has: the names tell the versions apart.
void LowerByGroup(const std::string& folder, CgroupLimits* limits) {
  for (const char* file : {"/memory.max", "/memory.high", "/memory.limit_in_bytes"}) {
    Lower(&limits->memory_bytes, ReadNumber(folder + file));
  }
  Lower(&limits->memory_bytes, ReadHierarchicalLimit(folder));
  Lower(&limits->cpus, ReadCpus(folder));
}

// The folders of the process's groups and of those above them, from within.
std::vector<std::string> GroupFolders(const std::string& root) {
  std::vector<std::string> folders;
  const std::vector<Mount> mounts = ReadMounts(root);
  for (const Membership& membership : ReadMemberships(root)) {
    for (const Mount& mount : mounts) {
      if (!Shows(mount, membership)) continue;
      std::string group = FolderOf(membership, mount);
      while (true) {
        folders.push_back(absl::StrCat(mount.folder, group));
        if (group.empty()) break;
        group.resize(group.rfind('/'));
      }
    }
  }
  return folders;
}

}  // namespace

CgroupLimits ReadCgroupLimits(const std::string& root) {
  CgroupLimits limits;
  for (const std::string& folder : GroupFolders(root)) LowerByGroup(root + folder, &limits);
  return limits;
}

std::string FullPidsGroup(const std::string& root) {
  for (const std::string& folder : GroupFolders(root)) {
    const auto most = ReadNumber(absl::StrCat(root, folder, "/pids.max"));
    const auto now = ReadNumber(absl::StrCat(root, folder, "/pids.current"));
    if (most.has_value() && now.has_value() && *now >= *most) {
      return absl::StrCat(folder, "/pids.max is ", *most);
    }
  }
  return "";
}

}  // namespace flashcore::server
