// Frames to a server that does not read its local socket.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/local/connection.h"
#include "client/local/fields.h"
#include "proto/wire/frames.h"

namespace flashcore::client::local {
namespace {

// More than a socket takes before its other end reads.
constexpr size_t kBytes = wire::kMaxFrameBytes - 20;

// A connection, and the other end of its socket.
class ConnectionTest : public testing::Test {
 protected:
  ConnectionTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    EXPECT_TRUE(Connection::Start(File(ends[0]), &connection_).ok());
    server_.emplace(ends[1]);
  }

  // Sends `message` as the action of a request. Its answer is added to answered_.
  Status Send(const std::string& message, SteadyTime deadline = SteadyTime::max(), int fd = -1) {
    uint64_t id = 0;
    return connection_->Send(
        kField, message, fd, deadline,
        [this, message](const Status& status, const Connection::Reply&) {
          absl::MutexLock lock(&mutex_);
          answered_.push_back({status.code, message});
        },
        &id);
  }

  // Exactly `bytes` of the socket, with a descriptor if `fd` is not null.
  std::string ReadBytes(size_t bytes, File* fd) {
    std::string read(bytes, '\0');
    for (size_t done = 0; done < bytes;) {
      const wire::Received got = wire::ReceiveBytes(server_->get(), &read[done], bytes - done, 0,
                                                    [fd](int file) { *fd = File(file); });
      if (got.bytes <= 0) return "";
      done += static_cast<size_t>(got.bytes);
    }
    return read;
  }
  // The action of the next frame, with a descriptor if it has one.
  std::string Read(File* fd) {
    const std::string header = ReadBytes(wire::kFrameHeaderBytes, fd);
    const std::string message = ReadBytes(wire::FrameLength(header.data()), fd);
    Reader reader(message);
    while (reader.Next()) {
      if (reader.field() == kField) return std::string(reader.bytes());
    }
    return "";
  }
  std::string Read() {
    File none;
    std::string message = Read(&none);
    EXPECT_LT(none.get(), 0);
    return message;
  }

  std::vector<std::pair<int, std::string>> WaitForAnswered(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return answered_.size() >= count;
    };
    mutex_.Await(absl::Condition(&enough));
    return answered_;
  }

  static constexpr uint32_t kField = 7;
  absl::Mutex mutex_;
  std::vector<std::pair<int, std::string>> answered_ ABSL_GUARDED_BY(mutex_);
  std::optional<File> server_;
  std::shared_ptr<Connection> connection_;
};

TEST_F(ConnectionTest, SendsWholeFramesInOrderWithoutWaiting) {
  std::vector<std::string> messages;
  for (int i = 0; i < 6; ++i) {
    messages.emplace_back(i % 2 == 0 ? kBytes + i : 10 + i, static_cast<char>('a' + i));
    EXPECT_TRUE(Send(messages.back()).ok());
  }
  for (const std::string& message : messages) EXPECT_TRUE(Read() == message);
  EXPECT_TRUE(Send("all gone").ok());
  EXPECT_EQ(Read(), "all gone");
}

TEST_F(ConnectionTest, AFrameThatWaitsKeepsItsDescriptor) {
  EXPECT_TRUE(Send(std::string(kBytes, 'x')).ok());
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const File reader(pipe_fds[0]);
  {
    const File writer(pipe_fds[1]);
    EXPECT_TRUE(Send("with", SteadyTime::max(), writer.get()).ok());
  }
  EXPECT_EQ(Read().size(), kBytes);
  File passed;
  EXPECT_EQ(Read(&passed), "with");
  EXPECT_EQ(write(passed.get(), "!", 1), 1);
  char byte = 0;
  EXPECT_EQ(read(reader.get(), &byte, 1), 1);
  EXPECT_EQ(byte, '!');
}

// A frame that is on its way is sent to its end, however late.
TEST_F(ConnectionTest, DropsFramesThatAreNotBegunByTheirDeadline) {
  const SteadyTime past = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  EXPECT_TRUE(Send(std::string(kBytes, 'x'), past).ok());
  EXPECT_TRUE(Send("late", past).ok());
  EXPECT_TRUE(Send("in time").ok());
  EXPECT_TRUE(Send("late, too", past).ok());
  using Answered = std::vector<std::pair<int, std::string>>;
  EXPECT_EQ(WaitForAnswered(2),
            (Answered{{kDeadlineExceeded, "late"}, {kDeadlineExceeded, "late, too"}}));
  EXPECT_EQ(Read().size(), kBytes);
  EXPECT_EQ(Read(), "in time");
}

TEST_F(ConnectionTest, EndsWithTheSocket) {
  EXPECT_TRUE(Send(std::string(kBytes, 'x')).ok());
  server_.reset();
  EXPECT_EQ(WaitForAnswered(1)[0].first, kUnavailable);
  EXPECT_EQ(Send("more").code, kUnavailable);
}

TEST_F(ConnectionTest, RefusesWhatIsTooLarge) {
  EXPECT_EQ(Send(std::string(wire::kMaxFrameBytes + 1, 'x')).code, kResourceExhausted);
}

TEST(PathTest, SaysWhatIsWrong) {
  EXPECT_TRUE(CheckPath("/run/flashcore/local.sock").ok());
  for (const std::string& path : {std::string(), std::string("a/b"), std::string(108, '/')}) {
    EXPECT_EQ(CheckPath(path).code, kInvalidArgument) << path;
  }
}

}  // namespace
}  // namespace flashcore::client::local
