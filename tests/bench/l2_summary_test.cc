#include "tests/bench/l2_summary.h"

#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::kernels {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

TEST(L2SummaryTest, GainAndCostAreOfTheTimeWithoutTheWindow) {
  // 20 us become 16, and 20 become 25: the inverse factors, but 20% and 25% of the same 20 us.
  EXPECT_THAT(ChangePercent({16, 25, 20}, {20, 20, 20}),
              ElementsAre(DoubleNear(-20, 1e-9), DoubleNear(25, 1e-9), DoubleNear(0, 1e-9)));
}

TEST(L2SummaryTest, ComparesTimesOfTheSameRound) {
  EXPECT_THAT(ChangePercent({11, 22}, {10, 20}),
              ElementsAre(DoubleNear(10, 1e-9), DoubleNear(10, 1e-9)));
}

TEST(L2SummaryTest, SpreadIsMedianLeastAndGreatest) {
  const Spread odd = SpreadOf({5, 1, 3});
  EXPECT_EQ(odd.median, 3);
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.max, 5);
  EXPECT_EQ(SpreadOf({4, 1, 3, 2}).median, 2.5);
  EXPECT_EQ(SpreadOf({7}).median, 7);
}

TEST(L2SummaryTest, BlocksForRateAreBetweenTheNeighboursThatWereMeasured) {
  const std::map<int, double> rates = {{10, 100}, {20, 180}, {40, 200}, {80, 198}};
  EXPECT_EQ(BlocksForRate(rates, 50), 5);  // no block reads nothing
  EXPECT_EQ(BlocksForRate(rates, 100), 10);
  EXPECT_EQ(BlocksForRate(rates, 140), 15);
  EXPECT_EQ(BlocksForRate(rates, 190), 30);
  EXPECT_EQ(BlocksForRate(rates, 200), 40);
}

TEST(L2SummaryTest, BlocksForRateAreTheFewestWhereMoreAreSlower) {
  EXPECT_EQ(BlocksForRate({{10, 100}, {20, 90}, {30, 110}}, 95), 10);  // 9.5, rounded
  EXPECT_EQ(BlocksForRate({{10, 100}, {20, 90}, {30, 110}}, 105), 28);
}

TEST(L2SummaryTest, BlocksForRateAreAtLeastOne) { EXPECT_EQ(BlocksForRate({{1, 100}}, 1), 1); }

TEST(L2SummaryTest, BlocksForRateAreThoseOfTheHighestIfNoneReachesIt) {
  EXPECT_EQ(BlocksForRate({{10, 100}, {20, 120}, {40, 110}}, 130), 20);
}

}  // namespace
}  // namespace flashcore::kernels
