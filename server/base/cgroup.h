// The limits that the control groups of this process, and so its container, set.
#ifndef FLASHCORE_SERVER_BASE_CGROUP_H_
#define FLASHCORE_SERVER_BASE_CGROUP_H_

#include <cstdint>
#include <optional>
#include <string>

namespace flashcore::server {

// Nullopt: no limit.
struct CgroupLimits {
  std::optional<int64_t> memory_bytes;
  std::optional<double> cpus;  // seconds of CPU time a second
};

// The least that the process's groups and those above them allow, of version 1 and of 2, as far as
// they are mounted. `root` is a folder in place of /, with its proc and the mounts that it names:
// for tests.
CgroupLimits ReadCgroupLimits(const std::string& root = "");

// The first of these groups without room for another thread, such as "/sys/fs/cgroup/a/pids.max is
// 64"; empty if each has some.
std::string FullPidsGroup(const std::string& root = "");

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_CGROUP_H_
