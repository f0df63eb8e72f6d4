#include "server/sharing/shares.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

// The holder that has to give back; empty: nobody.
std::string Debtor(const Shares& shares) {
  const Shares::Account* const debtor = shares.Debtor();
  return debtor == nullptr ? "" : debtor->holder;
}

TEST(SharesTest, AHolderBeyondItsShareHasToGiveBack) {
  Shares shares({100, 30});
  Shares::Account* const a = shares.Take("a", 30);
  EXPECT_EQ(Debtor(shares), "");
  EXPECT_FALSE(shares.IsOverShare("a", 0));
  EXPECT_TRUE(shares.IsOverShare("a", 1));
  EXPECT_FALSE(shares.IsOverShare("b", 30));
  shares.Take("a", 1);
  EXPECT_EQ(Debtor(shares), "a");
  shares.Give(a, 1);
  EXPECT_EQ(Debtor(shares), "");
}

TEST(SharesTest, TheOneThatHoldsTheMostMakesRoomForAll) {
  Shares shares({100, 60});
  Shares::Account* const a = shares.Take("a", 60);
  shares.Take("b", 40);
  EXPECT_EQ(Debtor(shares), "");
  shares.Take("c", 1);
  EXPECT_EQ(Debtor(shares), "a");
  shares.Give(a, 30);
  EXPECT_EQ(Debtor(shares), "");
  shares.Take("c", 30);
  EXPECT_EQ(Debtor(shares), "b");
}

TEST(SharesTest, OfSeveralBeyondTheirShareTheOneThatHoldsTheMost) {
  Shares shares({0, 10});
  Shares::Account* const a = shares.Take("a", 12);
  Shares::Account* const b = shares.Take("b", 15);
  EXPECT_EQ(Debtor(shares), "b");
  shares.Give(b, 5);
  EXPECT_EQ(Debtor(shares), "a");
  shares.Give(a, 12);
  EXPECT_EQ(Debtor(shares), "");
  EXPECT_EQ(shares.held(), 10u);
  EXPECT_EQ(shares.held("a"), 0u);
}

TEST(SharesTest, TheLargestIsKnownWithoutLimits) {
  Shares shares({0, 0});
  EXPECT_EQ(shares.Largest(), nullptr);
  Shares::Account* const a = shares.Take("a", 2);
  shares.Take("b", 1);
  EXPECT_EQ(shares.Largest()->holder, "a");
  shares.Give(a, 2);
  EXPECT_EQ(shares.Largest()->holder, "b");
}

TEST(SharesTest, ALimitOf0IsNone) {
  Shares shares({0, 0});
  shares.Take("a", size_t{1} << 40);
  EXPECT_EQ(Debtor(shares), "");
  EXPECT_FALSE(shares.IsOverShare("a", size_t{1} << 40));
}

TEST(SharesTest, ItemsAreListedOldestFirst) {
  Shares shares({0, 0});
  Shares::Item first, second, third;
  shares.Take("a", 1, &first);
  shares.Take("a", 2, &second);
  shares.Take("a", 3, &third);
  const Shares::Account* const a = first.account;
  EXPECT_EQ(a->oldest, &first);
  EXPECT_EQ(a->newest, &third);
  EXPECT_EQ(shares.items(), 3u);
  shares.Give(&second);
  EXPECT_EQ(first.newer, &third);
  EXPECT_EQ(third.older, &first);
  shares.Give(&first);
  EXPECT_EQ(a->oldest, &third);
  EXPECT_EQ(shares.held("a"), 3u);
  shares.Give(&third);
  EXPECT_EQ(a->oldest, nullptr);
  EXPECT_EQ(a->newest, nullptr);
  EXPECT_EQ(third.account, nullptr);
  EXPECT_EQ(shares.items(), 0u);
}

TEST(SharesTest, ManyHoldersComeAndGo) {
  Shares shares({0, 0});
  for (int round = 0; round < 2; ++round) {
    std::vector<Shares::Account*> accounts;
    for (int i = 0; i < 1000; ++i) {
      accounts.push_back(shares.Take("holder " + std::to_string(i), i + 1));
    }
    EXPECT_EQ(shares.held("holder 999"), 1000u);
    for (int i = 0; i < 1000; ++i) {
      EXPECT_EQ(accounts[i]->holder, "holder " + std::to_string(i));
      shares.Give(accounts[i], i + 1);
    }
    EXPECT_EQ(shares.held(), 0u);
  }
}

}  // namespace
}  // namespace flashcore::server
