#include "server/sharing/call_room.h"

#include <memory>
#include <string>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

TEST(CallRoomTest, AClientBeyondItsShareWaitsUntilHalfOfItIsFree) {
  CallRoom room({0, 100});
  auto first = std::make_unique<CallRoom::Charge>(&room, "a", 50);
  auto second = std::make_unique<CallRoom::Charge>(&room, "a", 50);
  EXPECT_TRUE(room.HasRoom("a"));
  auto third = std::make_unique<CallRoom::Charge>(&room, "a", 1);
  EXPECT_FALSE(room.HasRoom("a"));
  EXPECT_TRUE(room.HasRoom("b"));
  int runs = 0;
  room.WaitForRoom("a", [&] { ++runs; });
  room.WaitForRoom("a", [&] { ++runs; });
  third.reset();
  EXPECT_EQ(runs, 0);
  second.reset();
  EXPECT_EQ(runs, 2);
  first.reset();
  EXPECT_EQ(runs, 2);
  room.WaitForRoom("a", [&] { ++runs; });
  EXPECT_EQ(runs, 3) << "there is room";
}

TEST(CallRoomTest, WhenAllAreFullTheLargestWaits) {
  CallRoom room({100, 60});
  const CallRoom::Charge a(&room, "a", 50);
  auto b = std::make_unique<CallRoom::Charge>(&room, "b", 55);
  EXPECT_TRUE(room.HasRoom("a"));
  EXPECT_FALSE(room.HasRoom("b"));
  int runs = 0;
  room.WaitForRoom("b", [&] { ++runs; });
  b.reset();
  EXPECT_EQ(runs, 1);
}

// Their connections are looked at again only when memory comes back.
TEST(CallRoomTest, AllWhoHaveRoomAgainGoOn) {
  CallRoom room({100, 100});
  const CallRoom::Charge a(&room, "a", 20), b(&room, "b", 45);
  auto c = std::make_unique<CallRoom::Charge>(&room, "c", 36);
  std::string went_on;
  EXPECT_FALSE(room.HasRoom("b")) << "it holds the most";
  room.WaitForRoom("b", [&] { went_on += 'b'; });
  const CallRoom::Charge more(&room, "a", 30);
  EXPECT_FALSE(room.HasRoom("a"));
  room.WaitForRoom("a", [&] { went_on += 'a'; });
  EXPECT_EQ(went_on, "");
  c.reset();
  EXPECT_EQ(went_on, "ab");
}

}  // namespace
}  // namespace flashcore::server
