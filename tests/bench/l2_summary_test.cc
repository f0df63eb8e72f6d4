#include "tests/bench/l2_summary.h"

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

}  // namespace
}  // namespace flashcore::kernels
