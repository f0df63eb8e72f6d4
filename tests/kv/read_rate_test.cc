#include "server/kv/read_rate.h"

#include <chrono>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using std::chrono::seconds;

constexpr TimePoint kStart = TimePoint() + std::chrono::hours(100);

TEST(ReadRateTest, NothingReadIsNoRate) {
  EXPECT_EQ(ReadRate().BytesPerSecond(kStart), 0);
  EXPECT_EQ(ReadRate().BytesPerSecond(TimePoint()), 0);
}

TEST(ReadRateTest, HalvesInAHalfLife) {
  ReadRate rate;
  rate.Add(1000, kStart);
  const double first = rate.BytesPerSecond(kStart);
  EXPECT_NEAR(first, 69.3, 0.1);
  EXPECT_DOUBLE_EQ(rate.BytesPerSecond(kStart + ReadRate::kHalfLife), first / 2);
  EXPECT_DOUBLE_EQ(rate.BytesPerSecond(kStart + 3 * ReadRate::kHalfLife), first / 8);
  EXPECT_LT(rate.BytesPerSecond(kStart + 2000 * ReadRate::kHalfLife), 1e-100);
  EXPECT_DOUBLE_EQ(rate.BytesPerSecond(kStart), first) << "to look changes nothing";
}

TEST(ReadRateTest, AddsUp) {
  ReadRate rate;
  rate.Add(1000, kStart);
  const double first = rate.BytesPerSecond(kStart);
  rate.Add(1000, kStart);
  EXPECT_DOUBLE_EQ(rate.BytesPerSecond(kStart), 2 * first);
  rate.Add(1000, kStart + ReadRate::kHalfLife);
  EXPECT_DOUBLE_EQ(rate.BytesPerSecond(kStart + ReadRate::kHalfLife), 2 * first);
}

TEST(ReadRateTest, ConvergesToASteadyRate) {
  ReadRate rate;
  TimePoint now = kStart;
  for (int i = 0; i < 1000; ++i) rate.Add(500, now += std::chrono::milliseconds(100));
  EXPECT_NEAR(rate.BytesPerSecond(now), 5000, 50);
}

TEST(ReadRateTest, ATimeBeforeTheLastCountsAsTheLast) {
  ReadRate late, same;
  late.Add(1000, kStart);
  late.Add(1000, kStart - seconds(30));
  same.Add(1000, kStart);
  same.Add(1000, kStart);
  for (const seconds after : {seconds(-30), seconds(0), seconds(7)}) {
    EXPECT_EQ(late.BytesPerSecond(kStart + after), same.BytesPerSecond(kStart + after));
  }
}

}  // namespace
}  // namespace flashcore::server
