// Lists of cores, and threads that stay on them.
#include "server/base/cores.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::Optional;

TEST(CoresTest, ListsAndRangesInTheirOrder) {
  EXPECT_THAT(ParseCores("3"), Optional(ElementsAre(3)));
  EXPECT_THAT(ParseCores("6-7,0,2-2"), Optional(ElementsAre(6, 7, 0, 2)));
  for (const char* bad : {"", ",", "1,", "-1", "1-", "5-3", "1-2-3", "x", "0x1", "1,1", "0-3,2",
                          "1024", "99999999999", "0-99999999999"}) {
    EXPECT_EQ(ParseCores(bad), std::nullopt) << bad;
  }
}

TEST(CoresTest, AThreadAndThoseItStartsStay) {
  const std::vector<int> all = AllowedCores();
  ASSERT_FALSE(all.empty());
  std::thread([&] {
    ASSERT_EQ(StayOnCores({all.back()}), absl::OkStatus());
    EXPECT_THAT(AllowedCores(), ElementsAre(all.back()));
    std::thread([&] { EXPECT_THAT(AllowedCores(), ElementsAre(all.back())); }).join();
    EXPECT_EQ(StayOnCores(all), absl::OkStatus()) << "back to where the process may be";
    EXPECT_EQ(AllowedCores(), all);
  }).join();
  EXPECT_EQ(AllowedCores(), all);
  std::thread([] { EXPECT_FALSE(StayOnCores({1023}).ok()); }).join();
}

TEST(CoresTest, NoMoreCanBeUsedThanAreAllowed) {
  EXPECT_GE(UsableCores(), 1);
  EXPECT_LE(UsableCores(), static_cast<int>(AllowedCores().size()));
}

}  // namespace
}  // namespace flashcore::server
