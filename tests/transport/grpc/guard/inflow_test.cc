#include "server/transport/grpc/guard/inflow.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "server/base/socket.h"
#include "tests/base/lingering_socket.h"
#include "tests/transport/grpc/guard/frames.h"

namespace flashcore::server {
namespace {

using testing::Frame;

const std::string kPreface =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(testing::kSettings, 0, 0, "");
const std::string kAck = Frame(testing::kSettings, testing::kAckFlag, 0, "");

class InflowTest : public ::testing::Test {
 protected:
  InflowTest() {
    limits_.streams = 4;
    limits_.calls = 16;
    limits_.excess_of_all = 100;
    limits_.frames = 100;
    limits_.pings = 10;
    limits_.header_bytes = 1000;
    limits_.turn_bytes = 2000;
    Connect();
  }
  ~InflowTest() override { Inflow::SetExcessOfAll(0); }

  void Connect() {
    server_.reset();
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    client_.reset(ends[0]);
    server_.reset(fcntl(ends[1], F_DUPFD_CLOEXEC, 400));
    close(ends[1]);
    inflow_ = Inflow::Of(server_.get());
    Begin();
  }
  void Begin(bool tls = false) {
    Inflow::SetExcessOfAll(0);
    stream_ = 1;
    inflow_->Begin(server_.get(), tls, calls_, inflow_of_client_, limits_);
  }
  bool Receive(absl::string_view bytes) { return inflow_->Receive({&bytes, 1}); }
  // So many HEADERS frames of new streams.
  std::string Calls(int count) {
    std::string frames;
    for (; count > 0; --count, stream_ += 2) {
      frames += Frame(testing::kHeaders, testing::kEndHeaders, stream_, "");
    }
    return frames;
  }
  // So many frames, of no stream.
  static std::string Frames(int count, char type, absl::string_view payload) {
    std::string frames;
    for (; count > 0; --count) frames += Frame(type, 0, 0, payload);
    return frames;
  }
  void Ended(int count) {
    for (; count > 0; --count) {
      calls_->CallBegan();
      calls_->CallEnded({});
    }
  }
  ssize_t Send(const std::string& bytes) {
    EXPECT_EQ(write(client_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    return static_cast<ssize_t>(bytes.size());
  }
  // As gRPC reads, at most 1000 bytes.
  ssize_t Read() {
    char buffer[1000];
    iovec pieces[] = {{buffer, 5}, {buffer + 5, sizeof(buffer) - 5}};
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    return recvmsg(server_.get(), &message, 0);
  }
  // From now on gRPC gets nothing, and the client sees the end.
  void ExpectCutOff() {
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(Read(), -1);
      EXPECT_EQ(errno, ECONNRESET);
    }
    char byte;
    EXPECT_EQ(read(client_.get(), &byte, 1), 0);  // shut down
  }

  FileDescriptor client_;
  FileDescriptor server_;
  Inflow* inflow_ = nullptr;
  Inflow::Limits limits_;
  const std::shared_ptr<ClientInflow> inflow_of_client_ = std::make_shared<ClientInflow>(8);
  const std::shared_ptr<ClientConnection> calls_ =
      std::make_shared<ClientConnection>("fd:400", Peer());
  uint32_t stream_ = 1;
};

TEST_F(InflowTest, BoundsCallsThatHaveNotEnded) {
  EXPECT_TRUE(Receive(kPreface + kAck + Calls(16)));
  EXPECT_EQ(inflow_->calls(), 16U);
  Ended(10);
  EXPECT_EQ(inflow_->calls(), 6U);
  EXPECT_TRUE(Receive(Calls(10)));
  EXPECT_FALSE(Receive(Calls(1)));
  EXPECT_TRUE(inflow_->cut_off());
  EXPECT_FALSE(Receive(""));
  EXPECT_EQ(inflow_->calls(), 16U);  // gRPC did not get the last one
}

TEST_F(InflowTest, ForgivesCallsThatEndWithoutAWord) {
  EXPECT_TRUE(Receive(kPreface + kAck + Calls(16)));
  inflow_->ForgiveCalls(12);
  EXPECT_EQ(inflow_->calls(), 4U);
  Ended(16);  // it was wrong: those do not count twice
  EXPECT_EQ(inflow_->calls(), 0U);
  inflow_->ForgiveCalls(100);
  EXPECT_TRUE(Receive(Calls(16)));
  EXPECT_EQ(inflow_->calls(), 16U);
  EXPECT_FALSE(Receive(Calls(1)));
}

TEST_F(InflowTest, NothingCountsForTheNextConnectionOfADescriptor) {
  const auto exhaust = [this] {
    EXPECT_TRUE(Receive(kPreface + kAck + Calls(16) + Frames(10, testing::kPing, "12345678")));
    EXPECT_EQ(inflow_->calls(), 16U);
  };
  exhaust();
  inflow_->ForgiveCalls(16);
  inflow_->HangUp();
  EXPECT_TRUE(Receive(Calls(16)));
  EXPECT_FALSE(Receive(Calls(1)));
  Connect();
  EXPECT_FALSE(inflow_->cut_off() || inflow_->hung_up());
  EXPECT_EQ(inflow_->calls(), 0U);
  exhaust();
  EXPECT_FALSE(Receive(Calls(1)));
}

TEST_F(InflowTest, MuchExcessOfAllLeavesEachItsStreams) {
  EXPECT_TRUE(Receive(kPreface + kAck));
  Inflow::SetExcessOfAll(101);
  EXPECT_TRUE(Receive(Calls(4)));
  EXPECT_FALSE(Receive(Calls(1)));
}

TEST_F(InflowTest, CallsThatBeginAreExcessBeforeTheNextCount) {
  EXPECT_TRUE(Receive(kPreface + kAck));
  Inflow::SetExcessOfAll(95);
  EXPECT_TRUE(Receive(Calls(9)));
  EXPECT_EQ(inflow_->excess(), 5U);
  EXPECT_FALSE(Receive(Calls(1)));
}

TEST_F(InflowTest, BoundsStreamsBeforeSettingsAreAcknowledged) {
  EXPECT_TRUE(Receive(kPreface + Calls(4)));
  Ended(4);
  EXPECT_FALSE(Receive(Calls(1)));
  Begin();
  EXPECT_TRUE(Receive(kPreface + Calls(4) + kAck));
  EXPECT_TRUE(Receive(Calls(1)));
}

TEST_F(InflowTest, BoundsResets) {
  const std::string reset = Frame(testing::kReset, 0, 1, "1234");
  EXPECT_TRUE(Receive(kPreface + kAck));
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(Receive(reset));
  inflow_->HasRead(1000, /*all=*/true);
  inflow_of_client_->ForgiveResets(2);
  EXPECT_TRUE(Receive(reset));
  inflow_->HasRead(1000, /*all=*/true);
  inflow_of_client_->ForgiveResets(100);  // no credit
  EXPECT_EQ(inflow_of_client_->resets(), 0U);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(Receive(reset));
  EXPECT_FALSE(Receive(reset));
}

TEST_F(InflowTest, BoundsResetsUntilAllIsRead) {
  const std::string reset = Frame(testing::kReset, 0, 1, "1234");
  EXPECT_TRUE(Receive(kPreface + kAck));
  for (const bool all : {true, false}) {
    inflow_->HasRead(1000, all);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(Receive(reset));
    inflow_of_client_->ForgiveResets(100);
  }
  inflow_->HasRead(1000, /*all=*/false);
  EXPECT_FALSE(Receive(reset));
  Connect();
  EXPECT_TRUE(Receive(kPreface + kAck));
  for (int i = 0; i < 20; ++i) {
    inflow_->HasRead(1000, /*all=*/true);
    EXPECT_TRUE(Receive(reset));
    inflow_of_client_->ForgiveResets(100);
  }
}

TEST_F(InflowTest, ResetsThatAreTooManyDoNotCountForOthersOfTheirClient) {
  std::string resets = kPreface;
  for (int i = 0; i < 9; ++i) resets += Frame(testing::kReset, 0, 1, "1234");
  EXPECT_FALSE(Receive(resets));
  EXPECT_EQ(inflow_of_client_->TakeCutOffs(), 1U);
  EXPECT_EQ(inflow_of_client_->TakeCutOffs(), 0U);
  EXPECT_EQ(inflow_of_client_->resets(), 0U);
  Connect();
  EXPECT_TRUE(Receive(kPreface + Frame(testing::kReset, 0, 1, "1234")));
  EXPECT_EQ(inflow_of_client_->resets(), 1U);
}

TEST_F(InflowTest, AReadWithRoomForMoreHasReadAll) {
  const std::string pings = Frames(9, testing::kPing, "12345678");
  Send(kPreface + pings);
  EXPECT_EQ(Read(), 186);
  Send(pings);
  EXPECT_EQ(Read(), 153);
  EXPECT_FALSE(inflow_->cut_off());
}

TEST_F(InflowTest, BoundsFramesUntilAllIsRead) {
  EXPECT_TRUE(Receive(kPreface + Frames(99, testing::kWindowUpdate, "1234")));  // and SETTINGS
  inflow_->HasRead(1000, /*all=*/true);
  EXPECT_TRUE(Receive(Frames(90, testing::kWindowUpdate, "1234")));
  inflow_->HasRead(1000, /*all=*/false);
  EXPECT_TRUE(Receive(Frame(testing::kData, 0, 1, std::string(256 * 20, 'd'))));  // pays for 20
  EXPECT_TRUE(Receive(Frames(29, testing::kWindowUpdate, "1234")));
  EXPECT_FALSE(Receive(Frames(10, testing::kWindowUpdate, "1234")));
}

TEST_F(InflowTest, BoundsPingsUntilAllIsRead) {
  EXPECT_TRUE(Receive(kPreface + Frames(10, testing::kPing, "12345678")));
  inflow_->HasRead(1000, /*all=*/true);
  EXPECT_TRUE(Receive(Frames(5, testing::kPing, "12345678")));
  inflow_->HasRead(1000, /*all=*/false);
  EXPECT_TRUE(Receive(Frames(5, testing::kPing, "12345678")));
  EXPECT_FALSE(Receive(Frames(1, testing::kPing, "12345678")));
}

TEST_F(InflowTest, ReadsInTurns) {
  const FileDescriptor epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = 7;
  ASSERT_EQ(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, server_.get(), &event), 0);
  const auto readable = [&] {
    epoll_event ready = {};
    return epoll_wait(epoll.get(), &ready, 1, 0) == 1 && ready.data.u64 == 7;
  };
  Send(kPreface + Frame(testing::kData, 0, 1, std::string(4000, 'd')));
  EXPECT_TRUE(readable());
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(Read(), 1000);
    EXPECT_FALSE(readable());
    EXPECT_EQ(Read(), 1000);
    EXPECT_EQ(Read(), -1);
    EXPECT_EQ(errno, EAGAIN);
    EXPECT_TRUE(readable());
  }
  EXPECT_EQ(Read(), 42);
  EXPECT_EQ(Read(), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_FALSE(readable());
}

TEST_F(InflowTest, TheThreadThatTakesOverDoesNotRead) {
  const FileDescriptor epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  ASSERT_EQ(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, server_.get(), &event), 0);
  const ssize_t sent = Send(kPreface);
  {
    const InflowOfThread taking_over(inflow_);
    ASSERT_EQ(epoll_wait(epoll.get(), &event, 1, 0), 1);
    EXPECT_EQ(Read(), -1);
    EXPECT_EQ(errno, EAGAIN);
    EXPECT_EQ(epoll_wait(epoll.get(), &event, 1, 0), 0);
  }
  // Now epoll says again that there is something to read.
  EXPECT_EQ(epoll_wait(epoll.get(), &event, 1, 0), 1);
  EXPECT_EQ(Read(), sent);
  EXPECT_EQ(epoll_wait(epoll.get(), &event, 1, 0), 0);
}

TEST_F(InflowTest, ATurnWithoutEpollHasNoEnd) {
  Send(kPreface + Frame(testing::kData, 0, 1, std::string(4000, 'd')));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Read(), 1000);
  EXPECT_EQ(Read(), 42);
}

TEST_F(InflowTest, BoundsHeaders) {
  EXPECT_TRUE(Receive(kPreface + Frame(testing::kHeaders, 0, 1, std::string(600, 'h'))));
  EXPECT_TRUE(Receive(Frame(testing::kContinuation, 0, 1, std::string(400, 'h'))));
  EXPECT_FALSE(Receive(Frame(testing::kContinuation, 0, 1, "h")));
}

TEST_F(InflowTest, GrpcDoesNotGetWhatIsTooMuch) {
  const ssize_t size = Send(kPreface + kAck + Calls(16));
  EXPECT_EQ(Read(), size);
  EXPECT_EQ(Read(), -1);
  EXPECT_EQ(errno, EAGAIN);
  Send(Calls(1));
  ExpectCutOff();
}

// As a flood is: whoever the connection counts for is banned.
TEST_F(InflowTest, AConnectionThatBringsAFileIsCutOff) {
  testing::LingeringSocket socket;
  {
    const FileDescriptor file = socket.Take();
    testing::Pass(client_.get(), file.get());
  }
  Send(kPreface);
  ExpectCutOff();  // the first read would last an hour
  EXPECT_TRUE(socket.IsClosed());
  EXPECT_TRUE(inflow_->cut_off());
  EXPECT_EQ(inflow_of_client_->TakeCutOffs(), 1U);
}

TEST_F(InflowTest, AFileNeverBecomesADescriptor) {
  testing::LingeringSocket socket;
  {
    const FileDescriptor file = socket.Take();
    testing::Pass(client_.get(), file.get());
  }
  char byte = 0;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec piece = {&byte, 1};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  EXPECT_EQ(recvmsg(server_.get(), &message, 0), -1);
  EXPECT_EQ(message.msg_controllen, 0U);
  EXPECT_TRUE(socket.IsClosed());
}

TEST_F(InflowTest, GrpcGetsNothingMoreOfAClientThatIsGone) {
  EXPECT_EQ(write(client_.get(), "x", 1), 1);
  inflow_->HangUp();
  EXPECT_EQ(Read(), 0);
}

TEST_F(InflowTest, WhatTlsEncryptsIsNotCounted) {
  Begin(/*tls=*/true);
  const std::string bytes = kPreface + Calls(17);
  EXPECT_EQ(write(client_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(Read(), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(inflow_->calls(), 0U);
}

TEST(InflowOfTest, ADescriptorHasOne) {
  EXPECT_EQ(Inflow::Of(500), Inflow::Of(500));
  EXPECT_NE(Inflow::Of(500), Inflow::Of(501));
  EXPECT_EQ(Inflow::Of(-1), nullptr);
  EXPECT_EQ(Inflow::Of(1 << 30), nullptr);
}

}  // namespace
}  // namespace flashcore::server
