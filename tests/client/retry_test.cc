#include <memory>
#include <random>
#include <utility>

#include "absl/synchronization/notification.h"
#include "client/cpp/attend_call.h"
#include "client/cpp/connection.h"
#include "gtest/gtest.h"
#include "tests/base/test_seed.h"

namespace flashcore::client {
namespace {

const absl::Time kNow = absl::UnixEpoch();

std::optional<absl::Duration> Backoff(int attempts, std::mt19937_64* random,
                                      absl::Time deadline = absl::InfiniteFuture()) {
  RetryPolicy policy;
  policy.max_attempts = 10;
  policy.initial_backoff = absl::Milliseconds(100);
  policy.max_backoff = absl::Milliseconds(350);
  return NextBackoff(policy, absl::UnavailableError(""), true, attempts, kNow, deadline, *random);
}

TEST(RetryTest, WaitsGrowToTheCeilingWithJitter) {
  std::mt19937_64 random(TestSeed());
  for (int trial = 0; trial < 100; ++trial) {
    const int ceilings_ms[] = {100, 200, 350, 350};
    for (int attempts = 1; attempts <= 4; ++attempts) {
      const absl::Duration ceiling = absl::Milliseconds(ceilings_ms[attempts - 1]);
      const absl::Duration wait = *Backoff(attempts, &random);
      EXPECT_LE(wait, ceiling);
      EXPECT_GE(wait, ceiling / 2);
    }
  }
}

TEST(RetryTest, GivesUp) {
  std::mt19937_64 random(TestSeed());
  EXPECT_FALSE(Backoff(10, &random).has_value());
  EXPECT_FALSE(Backoff(1, &random, kNow + absl::Milliseconds(50)).has_value());
  EXPECT_TRUE(Backoff(1, &random, kNow + absl::Milliseconds(101)).has_value());
  RetryPolicy policy;
  const absl::Time never = absl::InfiniteFuture();
  policy.max_attempts = 1;
  EXPECT_FALSE(NextBackoff(policy, absl::UnavailableError(""), true, 1, kNow, never, random));
  policy = {};
  EXPECT_FALSE(NextBackoff(policy, absl::UnavailableError(""), false, 1, kNow, never, random));
  for (const absl::Status& status : {absl::InternalError(""), absl::DeadlineExceededError(""),
                                     absl::ResourceExhaustedError(""), absl::OkStatus()}) {
    EXPECT_FALSE(NextBackoff(policy, status, true, 1, kNow, never, random)) << status;
  }
}

TEST(RetryTest, LastsUntilTheDeadline) {
  std::mt19937_64 random(TestSeed());
  const RetryPolicy policy;
  const absl::Time deadline = kNow + absl::Seconds(30);
  for (const int attempts : {1, 10, 100, 1'000'000}) {
    const auto wait = NextBackoff(policy, absl::UnavailableError(""), true, attempts,
                                  deadline - absl::Milliseconds(501), deadline, random);
    ASSERT_TRUE(wait.has_value()) << attempts;
    EXPECT_LE(*wait, absl::Milliseconds(500));
  }
}

TEST(RetryTest, WhatReachedNoServerIsSafeToRepeat) {
  std::mt19937_64 random(TestSeed());
  const auto repeats = [&](const absl::Status& status) {
    return NextBackoff({}, status, /*safe_to_repeat=*/false, 1, kNow, absl::InfiniteFuture(),
                       random)
        .has_value();
  };
  EXPECT_TRUE(repeats(absl::UnavailableError("failed to connect to all addresses; last error: x")));
  EXPECT_TRUE(repeats(absl::UnavailableError("DNS resolution failed for x:1: y")));
  EXPECT_FALSE(repeats(absl::UnavailableError("Socket closed")));
  EXPECT_FALSE(repeats(absl::InternalError("failed to connect")));
}

TEST(RetryTest, RefusesAPolicyThatMakesNoSense) {
  const auto error = [](const RetryPolicy& retry) {
    ClientOptions options;
    options.retry = retry;
    return std::string(Connection::Create("127.0.0.1:1", options).status().message());
  };
  EXPECT_EQ(error({}), "");
  EXPECT_EQ(error({-1}), "retry.max_attempts: -1; want at least 0");
  EXPECT_EQ(error({4, absl::ZeroDuration()}), "retry.initial_backoff: 0; want more than 0");
  EXPECT_EQ(error({4, absl::Seconds(1), -absl::Seconds(1)}),
            "retry.max_backoff: -1s; want more than 0");
}

// Attempts that all end at once.
class Refused final : public Attempts {
 public:
  explicit Refused(int* started) : started_(started) {}
  void Start(Done done) override {
    ++*started_;
    done(absl::UnavailableError("draining"), {});
  }
  void Cancel() override {}
  size_t request_bytes() const override { return 0; }

 private:
  int* const started_;
};

TEST(RetryTest, ACancelEndsTheWaitForTheNextAttempt) {
  ClientOptions options;
  options.retry.initial_backoff = options.retry.max_backoff = absl::Hours(1);
  int started = 0;
  absl::Notification done;
  absl::Status status;
  AttendCall::Args args;
  args.connection = *Connection::Create("127.0.0.1:1", options);
  args.attempts = std::make_unique<Refused>(&started);
  args.safe_to_repeat = true;
  args.deadline = absl::InfiniteFuture();
  args.done = [&](absl::Status answer, const AttendResult&) {
    status = std::move(answer);
    done.Notify();
  };
  const auto call = std::make_shared<AttendCall>(std::move(args));
  call->Start();  // waits for the second attempt when it returns
  EXPECT_FALSE(done.HasBeenNotified());
  call->Cancel();
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(started, 1);
}

}  // namespace
}  // namespace flashcore::client
