#include "server/base/socket.h"

#include <fcntl.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

// Called before code of this program listens. Tests of one thread set it.
std::function<void()> before_listen;

TEST(ListenTcpTest, AllAddressesOfANameHaveOnePort) {
  const auto sockets = ListenTcp("localhost", 0);
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  const int port = PortOf(LocalAddress(sockets->front().get()));
  EXPECT_GT(port, 0);
  for (const FileDescriptor& socket : *sockets) {
    EXPECT_EQ(PortOf(LocalAddress(socket.get())), port);
  }
  EXPECT_EQ(ListenTcp("localhost", port).status().code(), absl::StatusCode::kUnavailable);
}

TEST(ListenTcpTest, AnUnknownHostIsAnError) {
  EXPECT_EQ(ListenTcp("300.1.1.1", 0).status().code(), absl::StatusCode::kInvalidArgument);
}

class ListenUnixTest : public ::testing::Test {
 protected:
  ~ListenUnixTest() override {
    before_listen = nullptr;
    unlink(path_.c_str());
  }

  struct stat File() const {
    struct stat file = {};
    EXPECT_EQ(lstat(path_.c_str(), &file), 0);
    return file;
  }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "listen_unix.", getpid());
};

TEST_F(ListenUnixTest, ReplacesTheFileOfAServerThatIsGoneOnly) {
  auto first = ListenUnix(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(ListenUnix(path_).status().code(), absl::StatusCode::kUnavailable);
  *first = FileDescriptor();
  EXPECT_TRUE(ListenUnix(path_).ok());
}

TEST_F(ListenUnixTest, LeavesOtherFilesAlone) {
  const FileDescriptor file(creat(path_.c_str(), 0600));
  EXPECT_EQ(ListenUnix(path_).status().code(), absl::StatusCode::kUnavailable);
  struct stat found;
  ASSERT_EQ(stat(path_.c_str(), &found), 0);
  EXPECT_TRUE(S_ISREG(found.st_mode));
}

TEST_F(ListenUnixTest, LeavesASocketAloneThatOthersUse) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const FileDescriptor datagrams(socket(AF_UNIX, SOCK_DGRAM, 0));
  ASSERT_EQ(bind(datagrams.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const ino_t inode = File().st_ino;
  EXPECT_EQ(ListenUnix(path_).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(File().st_ino, inode);
}

TEST_F(ListenUnixTest, HasItsModeAndGroupBeforeItListensWhateverTheUmaskIs) {
  const gid_t group = geteuid() == 0 ? 12345 : getegid();
  for (const mode_t mask : {0, 022, 077, 0777}) {
    for (const mode_t mode : {0600, 0660, 0666, 0777}) {
      int listens = 0;
      before_listen = [&] {
        ++listens;
        EXPECT_EQ(File().st_mode, S_IFSOCK | mode) << std::oct << mask;
        EXPECT_EQ(File().st_gid, group);
      };
      const mode_t before = umask(mask);
      const auto socket = ListenUnix(path_, {mode, group});
      umask(before);
      EXPECT_EQ(socket.status(), absl::OkStatus());
      EXPECT_EQ(listens, 1);
    }
  }
}

TEST_F(ListenUnixTest, IsForTheUserAndTheGroupOfTheProcessByDefault) {
  const auto socket = ListenUnix(path_);
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_EQ(File().st_mode, S_IFSOCK | 0660u);
  EXPECT_EQ(File().st_gid, getegid());
}

TEST_F(ListenUnixTest, AGroupThatTheProcessMayNotGiveIsAnErrorAndLeavesNoFile) {
  absl::Status status;
  // The thread's file system user has no capabilities.
  std::thread([&] {
    setfsuid(12345);
    status = ListenUnix(path_, {0660, 54321}).status();
  }).join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("the group 54321 (--unix_socket_group)"));
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(ListenUnixTest, ALongPathIsAnError) {
  EXPECT_EQ(ListenUnix("/" + std::string(200, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace flashcore::server

// The linker option --wrap directs calls of listen here.
extern "C" {
int __real_listen(int socket, int backlog);
int __wrap_listen(int socket, int backlog) {
  if (flashcore::server::before_listen) flashcore::server::before_listen();
  return __real_listen(socket, backlog);
}
}
