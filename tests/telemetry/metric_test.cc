#include "server/telemetry/metric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

// More threads than there are shards, so that some share one.
constexpr int kThreads = 2 * telemetry_internal::kShards + 1;

template <typename Work>
void RunOnThreads(Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

TEST(Counter, StartsAtZeroAndSumsOverThreads) {
  Counter counter;
  EXPECT_EQ(counter.Value(), 0u);
  RunOnThreads([&] {
    for (int i = 0; i < 1000; ++i) counter.Increment();
    counter.Increment(24);
  });
  EXPECT_EQ(counter.Value(), 1024u * kThreads);
}

TEST(Gauge, AddsAndTakesOffOnDifferentThreads) {
  Gauge gauge;
  std::thread([&] { gauge.Add(7); }).join();
  std::thread([&] { gauge.Add(-3); }).join();
  EXPECT_EQ(gauge.Value(), 4);
}

TEST(Gauge, KeepsWhatWasSetLast) {
  Gauge gauge;
  gauge.Set(5);
  std::thread([&] { gauge.Set(-2); }).join();
  EXPECT_EQ(gauge.Value(), -2);
}

TEST(Histogram, UpperBoundsAreInclusive) {
  Histogram histogram({1, 2, 5});
  for (const double value : {0.0, 1.0, std::nextafter(1.0, 2.0), 2.0, 4.9, 5.0, 5.1}) {
    histogram.Observe(value);
  }
  EXPECT_THAT(histogram.Read().counts, ElementsAre(2, 2, 2, 1));
  EXPECT_DOUBLE_EQ(histogram.Read().sum, 0 + 1 + 1 + 2 + 4.9 + 5 + 5.1);
}

// Every number of bounds, each edge from both sides, against a plain search.
TEST(Histogram, FindsTheBucketForAnyNumberOfBounds) {
  for (size_t n = 0; n <= Histogram::kMaxBounds; ++n) {
    std::vector<double> bounds;
    for (size_t i = 0; i < n; ++i) bounds.push_back(static_cast<double>(i + 1));
    Histogram histogram(bounds);
    for (size_t i = 0; i <= n; ++i) {
      histogram.Observe(static_cast<double>(i) + 0.5);
      if (i > 0) histogram.Observe(static_cast<double>(i));
    }
    const Histogram::Snapshot snapshot = histogram.Read();
    ASSERT_THAT(snapshot.counts, SizeIs(n + 1));
    for (size_t i = 0; i < n; ++i)
      EXPECT_EQ(snapshot.counts[i], 2u) << n << " bounds, bucket " << i;
    EXPECT_EQ(snapshot.counts[n], 1u) << n << " bounds, last bucket";
  }
}

TEST(Histogram, BadValuesDoNotSpoilTheSum) {
  Histogram histogram({1});
  histogram.Observe(-1);
  histogram.Observe(std::numeric_limits<double>::quiet_NaN());
  histogram.Observe(2);
  EXPECT_THAT(histogram.Read().counts, ElementsAre(2, 1));
  EXPECT_EQ(histogram.Read().sum, 2);
}

TEST(Histogram, MergesThreads) {
  Histogram histogram(LatencyBounds());
  RunOnThreads([&] {
    for (int i = 0; i < 1000; ++i) histogram.Observe(0.25);
  });
  uint64_t total = 0;
  for (const uint64_t count : histogram.Read().counts) total += count;
  EXPECT_EQ(total, 1000u * kThreads);
  EXPECT_EQ(histogram.Read().sum, 250.0 * kThreads);  // exact in binary
}

TEST(Histogram, ReadsWhileOthersObserve) {
  Histogram histogram({1});
  std::thread observer([&] {
    for (int i = 0; i < 20000; ++i) histogram.Observe(1);
  });
  uint64_t last = 0;
  for (int i = 0; i < 200; ++i) {
    const uint64_t count = histogram.Read().counts[0];
    EXPECT_GE(count, last);
    last = count;
  }
  observer.join();
  EXPECT_EQ(histogram.Read().counts[0], 20000u);
}

TEST(Bounds, LatencyHasThreeADecade) {
  const std::vector<double> bounds = LatencyBounds();
  EXPECT_EQ(bounds.front(), 1e-6);
  EXPECT_EQ(bounds.back(), 10);
  EXPECT_THAT(bounds, SizeIs(7 * 3 + 1));
  for (size_t i = 1; i < bounds.size(); ++i) {
    EXPECT_GT(bounds[i], bounds[i - 1]);
    EXPECT_LE(bounds[i], bounds[i - 1] * 2.501);
  }
}

TEST(Bounds, PowersOfTwo) { EXPECT_THAT(PowerOfTwoBounds(8), ElementsAre(1, 2, 4, 8)); }

}  // namespace
}  // namespace flashcore::server
