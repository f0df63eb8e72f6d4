#include "server/sharing/door.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using State = Door::State;

constexpr int kFree = 0;      // there is room
constexpr int kRefused = -1;  // the new connection

TimePoint At(int seconds) { return TimePoint(std::chrono::seconds(seconds)); }

class DoorTest : public ::testing::Test {
 protected:
  // An open connection, whose number is `socket`.
  void Open(int socket, const std::string& client, State state, int last_use) {
    open_.push_back({socket, door_.Enter(client), state, At(last_use)});
  }
  // The connection that makes room for a new one of `client`, which leaves again; or kFree, or
  // kRefused.
  int Come(const std::string& client) {
    Door::Client* newcomer = door_.Enter(client);
    int gives = kFree;
    if (door_.IsCrowded()) {
      const Door::Connection* connection = door_.WhoMakesRoom(open_, *newcomer);
      gives = connection == nullptr ? kRefused : connection->socket;
    }
    door_.Leave(newcomer);
    return gives;
  }

  Door door_{Shares::Limits{/*all=*/6, /*one=*/3}};
  std::vector<Door::Connection> open_;
};

TEST_F(DoorTest, BeyondItsShareAClientGivesOneOfItsOwn) {
  Open(1, "other", State::kSilent, 0);
  Open(2, "a", State::kBusy, 1);
  Open(3, "a", State::kIdle, 3);
  EXPECT_EQ(Come("a"), kFree);
  Open(4, "a", State::kIdle, 2);
  EXPECT_EQ(Come("a"), 4);  // idle for longest
  EXPECT_EQ(Come("other"), kFree);
  open_[2].state = State::kSilent;
  EXPECT_EQ(Come("a"), 3);
  open_[2].state = open_[3].state = State::kBusy;
  EXPECT_EQ(Come("a"), kRefused);
}

TEST_F(DoorTest, WhenItIsFullTheLargestClientMakesRoom) {
  for (const int socket : {1, 2, 3}) Open(socket, "large", State::kBusy, socket);
  Open(4, "small", State::kSilent, 0);
  Open(5, "b", State::kIdle, 0);
  Open(6, "c", State::kIdle, 0);
  EXPECT_EQ(Come("new"), 1);  // its last call ended longest ago
  open_[2].state = State::kIdle;
  EXPECT_EQ(Come("new"), 3);
  open_[1].state = State::kSilent;
  EXPECT_EQ(Come("small"), 2);
}

TEST_F(DoorTest, TheLargestClientItselfIsNotServedAtTheCostOfCalls) {
  for (const int socket : {1, 2}) Open(socket, "large", State::kBusy, 0);
  for (const int socket : {3, 4}) Open(socket, "b", State::kBusy, 0);
  for (const int socket : {5, 6}) Open(socket, "c", State::kBusy, 0);
  EXPECT_EQ(Come("large"), kRefused);
  EXPECT_EQ(Come("new"), 1);
  open_[3].state = State::kIdle;
  EXPECT_EQ(Come("large"), kRefused);  // it would have more than the others
  open_[1].state = State::kIdle;
  EXPECT_EQ(Come("large"), 2);
}

TEST_F(DoorTest, AmongEqualsOnlyIdleConnectionsMakeRoom) {
  for (const int socket : {1, 2, 3, 4, 5, 6}) {
    Open(socket, std::string(1, static_cast<char>('a' + socket)), State::kBusy, socket);
  }
  EXPECT_EQ(Come("new"), kRefused);
  open_[4].state = State::kIdle;
  EXPECT_EQ(Come("new"), 5);
}

TEST_F(DoorTest, AConnectionIsIdleSomeTimeAfterItsLastCall) {
  const TimePoint now = At(10);
  EXPECT_EQ(Door::StateOf(/*has_calls=*/true, At(0), now), State::kBusy);
  EXPECT_EQ(Door::StateOf(false, now - Door::kIdleAfter + Nanoseconds(1), now), State::kBusy);
  EXPECT_EQ(Door::StateOf(false, now - Door::kIdleAfter, now), State::kIdle);
}

class BanTest : public ::testing::Test {
 protected:
  // Bans "a". How long it is banned from `now` on.
  Nanoseconds Banned(TimePoint now) {
    door_.Ban("a", now);
    Nanoseconds length = Door::kFirstBan;
    while (door_.IsBanned("a", now + length)) length *= 2;
    EXPECT_TRUE(door_.IsBanned("a", now));
    EXPECT_TRUE(door_.IsBanned("a", now + length - Nanoseconds(1)));
    return length;
  }

  Door door_{Shares::Limits()};
};

TEST_F(BanTest, IsTwiceAsLongAsTheLastOneUpToALimit) {
  TimePoint now = At(0);
  EXPECT_FALSE(door_.IsBanned("a", now));
  Nanoseconds expected = Door::kFirstBan;
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(Banned(now), expected) << i;
    now += expected;
    expected = std::min(2 * expected, Door::kLongestBan);
  }
  EXPECT_EQ(expected, Door::kLongestBan);
  EXPECT_FALSE(door_.IsBanned("b", now));
}

TEST_F(BanTest, FloodsOfAClientThatIsBannedDoNotCount) {
  const TimePoint end = At(0) + Door::kFirstBan;
  door_.Ban("a", At(0));
  door_.Ban("a", end - Nanoseconds(1));
  EXPECT_FALSE(door_.IsBanned("a", end));
  EXPECT_EQ(Banned(end), 2 * Door::kFirstBan);
}

TEST_F(BanTest, IsForgottenAfterAWhile) {
  TimePoint now = At(0);
  now += Banned(now) + Door::kLongestBan - Nanoseconds(1);
  EXPECT_EQ(Banned(now), 2 * Door::kFirstBan);
  now += 2 * Door::kFirstBan + Door::kLongestBan;
  EXPECT_EQ(Banned(now), Door::kFirstBan);
}

TEST_F(BanTest, OnlySoManyAreRemembered) {
  door_.Ban("first", At(0));
  for (size_t i = 1; i < Door::kMaxBans; ++i) door_.Ban(absl::StrCat(i), At(0) + Nanoseconds(1));
  EXPECT_TRUE(door_.IsBanned("first", At(0)));
  door_.Ban("last", At(0) + Nanoseconds(1));
  EXPECT_FALSE(door_.IsBanned("first", At(0)));  // it would have ended first
  EXPECT_TRUE(door_.IsBanned("1", At(0)));
  EXPECT_TRUE(door_.IsBanned("last", At(0)));
  for (size_t i = 0; i < Door::kMaxBans; ++i) door_.Ban("1", At(1) + i * Door::kLongestBan);
  EXPECT_TRUE(door_.IsBanned("last", At(0)));  // a client that is remembered takes no new place
}

SocketAddress V4(uint32_t host) {
  SocketAddress v4;
  auto* in = reinterpret_cast<sockaddr_in*>(&v4.storage);
  in->sin_family = AF_INET;
  in->sin_addr.s_addr = htonl(host);
  return v4;
}

SocketAddress V6(const std::vector<uint8_t>& bytes) {
  SocketAddress v6;
  auto* in6 = reinterpret_cast<sockaddr_in6*>(&v6.storage);
  in6->sin6_family = AF_INET6;
  std::memcpy(&in6->sin6_addr, bytes.data(), bytes.size());
  return v6;
}

TEST(ConnectionClientTest, IsAUserOrTheLoopbackOrANetwork) {
  const SocketAddress mapped = V6({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 1, 2, 3, 4});
  EXPECT_EQ(ConnectionClient(V4(0x01020304), std::nullopt), "1.2.3.4");
  EXPECT_EQ(ConnectionClient(mapped, std::nullopt), "1.2.3.4");
  EXPECT_EQ(
      ConnectionClient(V6({0x20, 1, 0xd, 0xb8, 0, 0, 0, 7, 1, 2, 3, 4, 5, 6, 7, 8}), std::nullopt),
      "2001:db8:0:7::/64");
  const std::vector<SocketAddress> loopback = {
      V4(0x7f000001), V4(0x7f000007), V6({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 9}),
      V6({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1})};
  SocketAddress unix_socket;
  unix_socket.storage.ss_family = AF_UNIX;
  for (const SocketAddress& address : loopback) {
    EXPECT_EQ(ConnectionClient(address, std::nullopt), "loopback");
    EXPECT_EQ(ConnectionClient(address, 7), "uid:7");  // however the user comes
  }
  EXPECT_EQ(ConnectionClient(unix_socket, 7), "uid:7");
  EXPECT_EQ(ConnectionClient(unix_socket, std::nullopt), "uid:unknown");  // and not uid:0
}

}  // namespace
}  // namespace flashcore::server
