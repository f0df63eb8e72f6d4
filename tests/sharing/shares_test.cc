#include "server/sharing/shares.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

// The client that has to give back; empty: nobody.
std::string GivesBack(const Shares& shares) {
  const Shares::Client* const client = shares.MustGiveBack();
  return client == nullptr ? "" : client->name;
}

TEST(SharesTest, AClientBeyondItsShareHasToGiveBack) {
  Shares shares({100, 30});
  Shares::Client* const a = shares.Take("a", 30);
  EXPECT_EQ(GivesBack(shares), "");
  EXPECT_FALSE(shares.IsOverShare("a", 0));
  EXPECT_TRUE(shares.IsOverShare("a", 1));
  EXPECT_FALSE(shares.IsOverShare("b", 30));
  shares.Take("a", 1);
  EXPECT_EQ(GivesBack(shares), "a");
  shares.Give(a, 1);
  EXPECT_EQ(GivesBack(shares), "");
}

TEST(SharesTest, TheOneThatHoldsTheMostMakesRoomForAll) {
  Shares shares({100, 60});
  Shares::Client* const a = shares.Take("a", 60);
  shares.Take("b", 40);
  EXPECT_EQ(GivesBack(shares), "");
  shares.Take("c", 1);
  EXPECT_EQ(GivesBack(shares), "a");
  shares.Give(a, 30);
  EXPECT_EQ(GivesBack(shares), "");
  shares.Take("c", 30);
  EXPECT_EQ(GivesBack(shares), "b");
}

TEST(SharesTest, OfSeveralBeyondTheirShareTheOneThatHoldsTheMost) {
  Shares shares({0, 10});
  Shares::Client* const a = shares.Take("a", 12);
  Shares::Client* const b = shares.Take("b", 15);
  EXPECT_EQ(GivesBack(shares), "b");
  shares.Give(b, 5);
  EXPECT_EQ(GivesBack(shares), "a");
  shares.Give(a, 12);
  EXPECT_EQ(GivesBack(shares), "");
  EXPECT_EQ(shares.held(), 10u);
  EXPECT_EQ(shares.held("a"), 0u);
}

TEST(SharesTest, TheLargestIsKnownWithoutLimits) {
  Shares shares({0, 0});
  EXPECT_EQ(shares.Largest(), nullptr);
  Shares::Client* const a = shares.Take("a", 2);
  shares.Take("b", 1);
  EXPECT_EQ(shares.Largest()->name, "a");
  shares.Give(a, 2);
  EXPECT_EQ(shares.Largest()->name, "b");
}

TEST(SharesTest, ALimitOf0IsNone) {
  Shares shares({0, 0});
  shares.Take("a", size_t{1} << 40);
  EXPECT_EQ(GivesBack(shares), "");
  EXPECT_FALSE(shares.IsOverShare("a", size_t{1} << 40));
}

TEST(SharesTest, ItemsAreListedOldestFirst) {
  Shares shares({0, 0});
  Shares::Item first, second, third;
  shares.Take("a", 1, &first);
  shares.Take("a", 2, &second);
  shares.Take("a", 3, &third);
  const Shares::Client* const a = first.client;
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
  EXPECT_EQ(third.client, nullptr);
  EXPECT_EQ(shares.items(), 0u);
}

TEST(SharesTest, ManyClientsComeAndGo) {
  Shares shares({0, 0});
  for (int round = 0; round < 2; ++round) {
    std::vector<Shares::Client*> clients;
    for (int i = 0; i < 1000; ++i) {
      clients.push_back(shares.Take("client " + std::to_string(i), i + 1));
    }
    EXPECT_EQ(shares.held("client 999"), 1000u);
    for (int i = 0; i < 1000; ++i) {
      EXPECT_EQ(clients[i]->name, "client " + std::to_string(i));
      shares.Give(clients[i], i + 1);
    }
    EXPECT_EQ(shares.held(), 0u);
  }
}

}  // namespace
}  // namespace flashcore::server
