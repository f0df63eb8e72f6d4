// Frames to a server that does not read its local socket.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/local/outbox.h"
#include "proto/wire/frames.h"
#include "proto/wire/ring.h"

namespace flashcore::client::local {
namespace {

// More than a socket takes before its other end reads.
constexpr size_t kBytes = wire::kMaxFrameBytes - 10;

// An outbox, and the other end of its socket.
class OutboxTest : public testing::Test {
 protected:
  OutboxTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    socket_.emplace(UniqueFd(ends[0]));
    server_.emplace(UniqueFd(ends[1]));
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

  // The next frame, with a descriptor if `fd` is not null.
  std::string Read(UniqueFd* fd = nullptr) {
    std::string message;
    UniqueFd passed;
    EXPECT_EQ(server_->Receive(&message, &passed), absl::OkStatus());
    EXPECT_EQ(passed.get() >= 0, fd != nullptr);
    if (fd != nullptr) *fd = std::move(passed);
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

  std::optional<FrameSocket> socket_, server_;
  absl::Mutex mutex_;
  std::vector<uint64_t> expired_ ABSL_GUARDED_BY(mutex_);
  std::optional<Outbox> outbox_;
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
  server_.reset();
  while (Send(2, "more").ok()) absl::SleepFor(absl::Milliseconds(1));  // until the thread sees it
  EXPECT_EQ(Send(3, "more").code(), absl::StatusCode::kUnavailable);
}

TEST_F(OutboxTest, RefusesWhatIsTooLarge) {
  EXPECT_EQ(Send(1, std::string(wire::kMaxFrameBytes + 1, 'x')).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace flashcore::client::local
