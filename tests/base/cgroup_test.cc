// Limits of control groups, read from folders that look as the kernel's do.
#include "server/base/cgroup.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class CgroupTest : public testing::Test {
 protected:
  CgroupTest() : root_(testing::TempDir() + "/cgroup_test." + std::to_string(getpid())) {
    std::filesystem::remove_all(root_);
  }
  ~CgroupTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  CgroupLimits Read() { return ReadCgroupLimits(root_); }

  const std::string root_;
};

constexpr char kVersion2[] = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";

TEST_F(CgroupTest, WithoutGroupsNothingIsLimited) {
  const CgroupLimits limits = Read();
  EXPECT_EQ(limits.memory_bytes, std::nullopt);
  EXPECT_EQ(limits.cpus, std::nullopt);
}

TEST_F(CgroupTest, TheLeastOfAllGroupsAbove) {
  Write("/proc/self/cgroup", "0::/pod/server\n");
  Write("/proc/self/mountinfo", kVersion2);
  Write("/sys/fs/cgroup/pod/server/memory.max", "max\n");
  Write("/sys/fs/cgroup/pod/server/memory.high", "1073741824\n");
  Write("/sys/fs/cgroup/pod/server/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/pod/memory.max", "536870912\n");
  Write("/sys/fs/cgroup/pod/cpu.max", "50000 100000\n");
  const CgroupLimits limits = Read();
  EXPECT_EQ(limits.memory_bytes, 512 * kMiB);
  EXPECT_EQ(limits.cpus, 0.5);
}

TEST_F(CgroupTest, Version2InItsOwnNamespace) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/proc/self/mountinfo", kVersion2);
  Write("/sys/fs/cgroup/memory.max", "268435456\n");
  EXPECT_EQ(Read().memory_bytes, 256 * kMiB);
}

// Docker without a namespace of groups: the mount shows the container's group as its root.
TEST_F(CgroupTest, Version1WithinAContainer) {
  Write("/proc/self/cgroup",
        "5:memory:/docker/x\n4:pids:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n");
  Write("/proc/self/mountinfo",
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:5 /docker/x /sys/fs/cgroup/memory ro shared:3 - cgroup cgroup rw,memory\n"
        "3 1 0:6 /docker/x /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n"
        "4 1 0:7 /docker/x /sys/fs/cgroup/cpu\\040acct ro - cgroup cgroup rw,cpu,cpuacct\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/memory.stat",
        "cache 1\nhierarchical_memory_limit 536870912\nhierarchical_memsw_limit 1\n");
  Write("/sys/fs/cgroup/cpu acct/cpu.cfs_quota_us", "150000\n");
  Write("/sys/fs/cgroup/cpu acct/cpu.cfs_period_us", "100000\n");
  const CgroupLimits limits = Read();
  EXPECT_EQ(limits.memory_bytes, 512 * kMiB) << "of a group above, which no mount shows";
  EXPECT_EQ(limits.cpus, 1.5);
}

TEST_F(CgroupTest, NestedGroupsOfVersion1) {
  Write("/proc/self/cgroup", "5:memory:/a/b/c\n3:cpu:/a\n");
  Write("/proc/self/mountinfo",
        "2 1 0:5 / /m rw - cgroup cgroup rw,memory\n4 1 0:7 / /c rw - cgroup cgroup rw,cpu\n");
  Write("/m/a/b/c/memory.limit_in_bytes", "4294967296\n");
  Write("/m/a/b/memory.limit_in_bytes", "2147483648\n");
  Write("/m/a/memory.limit_in_bytes", "3221225472\n");
  Write("/c/a/cpu.cfs_quota_us", "-1\n");
  Write("/c/a/cpu.cfs_period_us", "100000\n");
  const CgroupLimits limits = Read();
  EXPECT_EQ(limits.memory_bytes, 2048 * kMiB);
  EXPECT_EQ(limits.cpus, std::nullopt);
}

// A process that was moved after its namespace was made is at "/../x" in it.
TEST_F(CgroupTest, AGroupOutsideTheMountIsTheMounts) {
  for (const char* group : {"/../x", "/elsewhere"}) {
    Write("/proc/self/cgroup", std::string("0::") + group + "\n");
    Write("/proc/self/mountinfo", "30 23 0:26 /pod /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    Write("/sys/fs/cgroup/memory.max", "1048576\n");
    EXPECT_EQ(Read().memory_bytes, kMiB) << group;
  }
}

TEST_F(CgroupTest, MeaninglessFilesLimitNothing) {
  Write("/proc/self/cgroup", "0\n\n0::/a\n");
  Write("/proc/self/mountinfo", std::string("cgroup\n1 2 3 - cgroup2\n") + kVersion2);
  Write("/sys/fs/cgroup/a/memory.max", "");
  Write("/sys/fs/cgroup/a/cpu.max", "100000 0\n");
  const CgroupLimits limits = Read();
  EXPECT_EQ(limits.memory_bytes, std::nullopt);
  EXPECT_EQ(limits.cpus, std::nullopt);
}

TEST_F(CgroupTest, AGroupOrOneAroundItHasNoRoomForThreads) {
  Write("/proc/self/cgroup", "0::/pod/server\n");
  Write("/proc/self/mountinfo", kVersion2);
  EXPECT_EQ(FullPidsGroup(root_), "");
  Write("/sys/fs/cgroup/pod/server/pids.max", "64\n");
  Write("/sys/fs/cgroup/pod/server/pids.current", "63\n");
  EXPECT_EQ(FullPidsGroup(root_), "");
  Write("/sys/fs/cgroup/pod/pids.max", "80\n");
  Write("/sys/fs/cgroup/pod/pids.current", "81\n");
  EXPECT_EQ(FullPidsGroup(root_), "/sys/fs/cgroup/pod/pids.max is 80");
  Write("/sys/fs/cgroup/pod/server/pids.current", "64\n");
  EXPECT_EQ(FullPidsGroup(root_), "/sys/fs/cgroup/pod/server/pids.max is 64");
  Write("/sys/fs/cgroup/pod/server/pids.max", "max\n");
  Write("/sys/fs/cgroup/pod/pids.max", "-7\n");
  EXPECT_EQ(FullPidsGroup(root_), "");
}

TEST_F(CgroupTest, AGroupOfVersion1HasNoRoomForThreads) {
  Write("/proc/self/cgroup", "8:memory:/a\n5:cpu,pids:/a\n0::/\n");
  Write("/proc/self/mountinfo", "2 1 0:5 / /p rw - cgroup cgroup rw,cpu,pids\n");
  Write("/p/a/pids.max", "30\n");
  Write("/p/a/pids.current", "30\n");
  EXPECT_EQ(FullPidsGroup(root_), "/p/a/pids.max is 30");
}

}  // namespace
}  // namespace flashcore::server
