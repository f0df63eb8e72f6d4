// The C interface against a fake server.
#include "flashcore/c.h"

#include <poll.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "tests/client/fake_local_server.h"

namespace flashcore {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int kDeadlineExceeded = 4;
constexpr int kUnavailable = 14;

class CTest : public ::testing::Test {
 protected:
  ~CTest() override { flashcore_close(client_); }

  void Connect() {
    ASSERT_EQ(flashcore_connect(server_.target().c_str(), "c_test", nullptr, &client_),
              FLASHCORE_OK)
        << flashcore_last_error();
  }
  // Submits a request without rows. Its answer has `tag`.
  void Submit(uint64_t tag) {
    ASSERT_EQ(flashcore_submit(client_, tag, nullptr, 0, 30 * kSecond), FLASHCORE_OK);
  }

  FakeLocalServer server_;
  flashcore_client* client_ = nullptr;
};

TEST_F(CTest, ACallThatTimesOutIsCancelled) {
  absl::Mutex mutex;
  std::vector<uint64_t> called, cancelled;
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply* reply) {
    absl::MutexLock lock(&mutex);
    if (request.has_cancel()) cancelled.push_back(request.id());
    if (!request.has_call()) return false;
    called.push_back(request.id());
    reply->set_id(12'345);  // of nobody
    return true;
  };
  Connect();
  flashcore_bytes response;
  EXPECT_EQ(flashcore_call(client_, "GetServerInfo", nullptr, 0, 1'000'000, &response),
            kDeadlineExceeded);
  const auto is_cancelled = [&] { return !cancelled.empty(); };
  absl::MutexLock lock(&mutex);
  EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&is_cancelled), absl::Minutes(1)));
  EXPECT_EQ(cancelled, called);
}

// With no time left nothing is sent, also no request that could be repeated.
TEST_F(CTest, ATimeoutOfZeroSendsNothing) {
  absl::Mutex mutex;
  int requests = 0;
  server_.on_request = [&](const v1::LocalRequest&, v1::LocalReply*) {
    absl::MutexLock lock(&mutex);
    ++requests;
    return false;
  };
  const flashcore_options options = {};
  flashcore_client* none = nullptr;
  EXPECT_EQ(flashcore_connect(server_.target().c_str(), "c_test", &options, &none),
            kDeadlineExceeded);
  EXPECT_EQ(none, nullptr);
  Connect();
  const auto sent = [&] {
    absl::MutexLock lock(&mutex);
    return requests;
  };
  const int of_connecting = sent();
  flashcore_memory memory;
  flashcore_bytes response;
  EXPECT_EQ(flashcore_register_memory(client_, 1, 0, 0, &memory), kDeadlineExceeded);
  EXPECT_EQ(flashcore_call(client_, "GetServerInfo", nullptr, 0, 0, &response), kDeadlineExceeded);
  EXPECT_EQ(flashcore_submit(client_, 1, nullptr, 0, 0), kDeadlineExceeded);
  EXPECT_EQ(server_.submitted(), 0u);
  flashcore_completion completion;
  EXPECT_EQ(flashcore_wait(client_, 0, &completion), FLASHCORE_AGAIN);
  // Requests are read in order: what came before a call has come once it is answered.
  EXPECT_NE(flashcore_call(client_, "GetServerInfo", nullptr, 0, -1, &response), kDeadlineExceeded);
  EXPECT_EQ(sent(), of_connecting + 1);
}

TEST_F(CTest, ATimeoutOfMoreThanAYearIsNone) {
  std::atomic<uint64_t> limits{0};
  server_.on_call = [&](const v1::LocalCall& call, std::string*) {
    limits += call.timeout_ns();
    return v1::Status();
  };
  flashcore_options options = {};
  for (const int64_t timeout : {int64_t{-1}, 366 * 24 * 3600 * kSecond, INT64_MAX}) {
    options.timeout_ns = timeout;
    ASSERT_EQ(flashcore_connect(server_.target().c_str(), "c_test", &options, &client_),
              FLASHCORE_OK);
    flashcore_memory memory;
    EXPECT_EQ(flashcore_register_memory(client_, 1, 0, timeout, &memory), FLASHCORE_OK);
    flashcore_bytes response;
    EXPECT_EQ(flashcore_call(client_, "GetServerInfo", nullptr, 0, timeout, &response),
              FLASHCORE_OK);
    EXPECT_EQ(flashcore_submit(client_, 1, nullptr, 0, timeout), FLASHCORE_OK);
    flashcore_completion completion;
    EXPECT_EQ(flashcore_wait(client_, timeout, &completion), FLASHCORE_OK);
    flashcore_close(std::exchange(client_, nullptr));
  }
  EXPECT_EQ(limits, 0u) << "what the calls told the server";
}

// How often the library has written to its eventfd since it was read.
uint64_t Events(int event) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(event));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  constexpr char kField[] = "eventfd-count:";
  const size_t field = text.find(kField);
  return field == text.npos ? 0 : std::stoull(text.substr(field + sizeof(kField) - 1), nullptr, 16);
}

// As with a socket whose other end is closed: an event loop comes back, and poll says why.
TEST_F(CTest, TheEventStaysReadableAfterTheEnd) {
  Connect();
  int event = -1;
  ASSERT_EQ(flashcore_event_fd(client_, &event), FLASHCORE_OK);
  Submit(1);
  Submit(2);
  const auto readable = [event](int timeout_ms) {
    pollfd file = {event, POLLIN, 0};
    return poll(&file, 1, timeout_ms) == 1;
  };
  constexpr int kPatience = 60'000;
  flashcore_completion completion;
  for (uint64_t tag = 1; tag <= 2; ++tag) {
    int code = FLASHCORE_AGAIN;
    while (code == FLASHCORE_AGAIN) {
      ASSERT_TRUE(readable(kPatience));
      code = flashcore_poll(client_, &completion);
    }
    ASSERT_EQ(code, FLASHCORE_OK);
    EXPECT_EQ(completion.tag, tag);
  }
  EXPECT_FALSE(readable(0)) << "there is no answer";
  Submit(3);
  ASSERT_TRUE(readable(kPatience));
  server_.Stop();
  // One event for the answer, which nobody has taken, and one for the end.
  while (Events(event) < 2) sched_yield();
  ASSERT_EQ(flashcore_poll(client_, &completion), FLASHCORE_OK);
  EXPECT_EQ(completion.tag, 3u);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(readable(kPatience)) << "the end is to be told";
    EXPECT_EQ(flashcore_poll(client_, &completion), kUnavailable);
  }
}

}  // namespace
}  // namespace flashcore
