#include <random>

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
  const RetryPolicy policy;
  const absl::Time never = absl::InfiniteFuture();
  EXPECT_FALSE(NextBackoff(policy, absl::UnavailableError(""), false, 1, kNow, never, random));
  for (const absl::Status& status : {absl::InternalError(""), absl::DeadlineExceededError(""),
                                     absl::ResourceExhaustedError(""), absl::OkStatus()}) {
    EXPECT_FALSE(NextBackoff(policy, status, true, 1, kNow, never, random)) << status;
  }
}

}  // namespace
}  // namespace flashcore::client
