// Frames to a server that does not read its local socket.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/local/outbox.h"
#include "proto/local_ring.h"

namespace flashcore::client::local {
namespace {

// More than a socket takes before its other end reads.
constexpr size_t kBytes = flashcore::local::kMaxFrameBytes - 10;

// An outbox, and the other end of its socket.
class OutboxTest : public testing::Test {
 protected:
  OutboxTest() {
    char folder[] = "/tmp/flashcore-outbox-XXXXXX";
    EXPECT_NE(mkdtemp(folder), nullptr);
    const std::string path = std::string(folder) + "/s";
    const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    socket_.emplace(*FrameSocket::Connect(path));
    server_ = UniqueFd(accept(listener.get(), nullptr, nullptr));
    unlink(path.c_str());
    rmdir(folder);
    outbox_.emplace(&*socket_, [this](uint64_t id) {
      absl::MutexLock lock(&mutex_);
      expired_.push_back(id);
    });
  }
  ~OutboxTest() override {
    socket_->Shutdown();
    outbox_.reset();
  }

  absl::Status Send(uint64_t id, const std::string& message,
                    absl::Time deadline = absl::InfiniteFuture(), int fd = -1) {
    return outbox_->Send(id, message, fd, deadline);
  }

  // The next frame, and the descriptor that came with it.
  std::string Read(UniqueFd* fd = nullptr) {
    uint32_t length = 0;
    ReadBytes(&length, sizeof(length), fd);
    std::string message(length, ' ');
    ReadBytes(message.data(), length, fd);
    return message;
  }

  std::vector<uint64_t> WaitForExpired(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return expired_.size() >= count;
    };
    mutex_.Await(absl::Condition(&enough));
    return expired_;
  }

  std::optional<FrameSocket> socket_;
  UniqueFd server_;
  absl::Mutex mutex_;
  std::vector<uint64_t> expired_ ABSL_GUARDED_BY(mutex_);
  std::optional<Outbox> outbox_;

 private:
  void ReadBytes(void* to, size_t size, UniqueFd* fd) const {
    while (size > 0) {
      iovec data = {to, size};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      msghdr header = {};
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      const ssize_t count = recvmsg(server_.get(), &header, 0);
      ASSERT_GT(count, 0);
      if (cmsghdr* const c = CMSG_FIRSTHDR(&header); c != nullptr) {
        ASSERT_NE(fd, nullptr) << "an unexpected descriptor";
        int passed = -1;
        std::memcpy(&passed, CMSG_DATA(c), sizeof(int));
        *fd = UniqueFd(passed);
      }
      to = static_cast<char*>(to) + count;
      size -= static_cast<size_t>(count);
    }
  }
};

TEST_F(OutboxTest, SendsWholeFramesInOrderWithoutWaiting) {
  std::vector<std::string> messages;
  for (int i = 0; i < 6; ++i) {
    messages.emplace_back(i % 2 == 0 ? kBytes + i : 10 + i, static_cast<char>('a' + i));
    EXPECT_TRUE(Send(i, messages.back()).ok());
  }
  for (const std::string& message : messages) EXPECT_TRUE(Read() == message);
  EXPECT_TRUE(Send(6, "all gone").ok());
  EXPECT_EQ(Read(), "all gone");
}

TEST_F(OutboxTest, AFrameThatWaitsKeepsItsDescriptor) {
  EXPECT_TRUE(Send(1, std::string(kBytes, 'x')).ok());
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const UniqueFd reader(pipe_fds[0]);
  {
    const UniqueFd writer(pipe_fds[1]);
    EXPECT_TRUE(Send(2, "with", absl::InfiniteFuture(), writer.get()).ok());
  }
  EXPECT_EQ(Read().size(), kBytes);
  UniqueFd passed;
  EXPECT_EQ(Read(&passed), "with");
  ASSERT_GE(passed.get(), 0);
  EXPECT_EQ(write(passed.get(), "!", 1), 1);
  char byte = 0;
  EXPECT_EQ(read(reader.get(), &byte, 1), 1);
  EXPECT_EQ(byte, '!');
}

// A frame that is on its way is sent to its end, however late.
TEST_F(OutboxTest, DropsFramesThatAreNotBegunByTheirDeadline) {
  const absl::Time past = absl::Now() - absl::Seconds(1);
  EXPECT_TRUE(Send(1, std::string(kBytes, 'x'), past).ok());
  EXPECT_TRUE(Send(2, "late", past).ok());
  EXPECT_TRUE(Send(3, "in time").ok());
  EXPECT_TRUE(Send(4, "late", past).ok());
  EXPECT_EQ(WaitForExpired(2), (std::vector<uint64_t>{2, 4}));
  EXPECT_EQ(Read().size(), kBytes);
  EXPECT_EQ(Read(), "in time");
}

TEST_F(OutboxTest, EndsWithTheSocket) {
  EXPECT_TRUE(Send(1, std::string(kBytes, 'x')).ok());
  server_ = UniqueFd();
  while (Send(2, "more").ok()) absl::SleepFor(absl::Milliseconds(1));  // until the thread sees it
  EXPECT_EQ(Send(3, "more").code(), absl::StatusCode::kUnavailable);
}

TEST_F(OutboxTest, RefusesWhatIsTooLarge) {
  EXPECT_EQ(Send(1, std::string(flashcore::local::kMaxFrameBytes + 1, 'x')).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace flashcore::client::local
