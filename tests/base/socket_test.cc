#include "server/base/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

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
  ~ListenUnixTest() override { unlink(path_.c_str()); }
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

TEST_F(ListenUnixTest, ALongPathIsAnError) {
  EXPECT_EQ(ListenUnix("/" + std::string(200, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace flashcore::server
