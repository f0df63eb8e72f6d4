// Frames that the client does not read at once.
#include "server/transport/local/frame_socket.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>

#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/base/lingering_socket.h"

namespace flashcore::server::local {
namespace {

class FrameSocketTest : public ::testing::Test {
 protected:
  FrameSocketTest() {
    unsent_.Start({{1 << 30, 1 << 28}, std::chrono::seconds(20)}, &clock_);
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
    client_ = FileDescriptor(ends[0]);
    socket_.emplace(FileDescriptor(ends[1]), "client", &passed_files_, &unsent_,
                    [](CutOff, bool) {});
  }
  // The frames that the socket gives now.
  size_t ReadAll() {
    std::string buffer(1 << 20, '\0');
    size_t all = 0;
    ssize_t got = 0;
    while ((got = recv(client_.get(), buffer.data(), buffer.size(), 0)) > 0) {
      all += static_cast<size_t>(got);
    }
    return all;
  }

  testing::FakeClock clock_;
  PassedFiles passed_files_;
  UnsentReplies unsent_;
  FileDescriptor client_{-1};
  std::optional<FrameSocket> socket_;
};

TEST_F(FrameSocketTest, GivesMemoryOnlyAndClosesOtherFiles) {
  testing::LingeringSocket socket;
  std::array<int, 2> pipe{};
  ASSERT_EQ(pipe2(pipe.data(), O_CLOEXEC), 0);
  const FileDescriptor reader(pipe[0]);
  {
    const FileDescriptor files[] = {FileDescriptor(memfd_create("m", MFD_CLOEXEC)), socket.Take(),
                                    FileDescriptor(pipe[1])};
    for (const FileDescriptor& file : files) testing::Pass(client_.get(), file.get());
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(socket_->Read().ok());
  EXPECT_TRUE(socket.IsClosed());
  char byte = 0;
  EXPECT_EQ(read(reader.get(), &byte, 1), 0);
  EXPECT_TRUE(socket_->TakeFile().ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(socket_->TakeFile().status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(FrameSocketTest, FilesThatNobodyTakesAreClosed) {
  testing::LingeringSocket sockets[6];
  for (testing::LingeringSocket& socket : sockets) {
    const FileDescriptor file = socket.Take();
    testing::Pass(client_.get(), file.get());
  }
  EXPECT_TRUE(socket_->Read().ok());  // one of them; the others stay in the queue
  socket_.reset();
  for (testing::LingeringSocket& socket : sockets) EXPECT_TRUE(socket.IsClosed());
  EXPECT_EQ(send(client_.get(), "x", 1, MSG_NOSIGNAL), -1);
}

TEST_F(FrameSocketTest, WhatTheClientReadsIsUnsentNoLonger) {
  const std::string message(100'000, 'x');
  size_t sent = 0, read = 0;
  for (; socket_->unsent_bytes() == 0; ++sent)
    ASSERT_TRUE(socket_->Send(message, nullptr, "client"));
  const size_t one = socket_->unsent_bytes();
  EXPECT_GE(one, message.size());
  for (int i = 0; i < 3; ++i, ++sent) ASSERT_TRUE(socket_->Send(message, nullptr, "client"));
  EXPECT_EQ(socket_->unsent_bytes(), 4 * one);
  EXPECT_EQ(unsent_.bytes(), static_cast<int64_t>(4 * one));
  while (socket_->unsent_bytes() > 0) {
    const size_t before = socket_->unsent_bytes();
    const size_t now = ReadAll();
    ASSERT_GT(now, 0u) << "nothing is left to read, but " << before << " bytes are unsent";
    read += now;
    ASSERT_TRUE(socket_->Flush());
    EXPECT_LE(socket_->unsent_bytes(), before);
  }
  EXPECT_EQ(unsent_.bytes(), 0);
  EXPECT_EQ(read + ReadAll(), sent * (message.size() + wire::kFrameHeaderBytes));
}

}  // namespace
}  // namespace flashcore::server::local
