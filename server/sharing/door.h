// Who may have how many connections at a door of the server, whose makes room for a new one, and
// who is not let in for a while.
#ifndef FLASHCORE_SERVER_SHARING_DOOR_H_
#define FLASHCORE_SERVER_SHARING_DOOR_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/socket.h"
#include "server/sharing/shares.h"

namespace flashcore::server {

// The key that a connection counts under: local user if known, else "loopback", else IPv4 address
// or IPv6 /64.
std::string ConnectionHolder(const SocketAddress& peer, std::optional<uid_t> user);

// The doors are TCP, the Unix sockets of gRPC, and the local socket. Each has connections of its
// own, so that nobody at one door can take those of another. Not thread-safe.
class Door {
 public:
  using Holder = Shares::Account;

  // In the order in which connections make room.
  enum class State {
    kSilent,  // has not begun to speak the protocol
    kIdle,    // no call is open, and none was for kIdleAfter
    kBusy,
  };
  // A client that makes one call after the other is not idle in between.
  static constexpr Nanoseconds kIdleAfter = std::chrono::seconds(1);

  // How long a holder is banned: at first, and at most.
  static constexpr Nanoseconds kFirstBan = std::chrono::seconds(4);
  static constexpr Nanoseconds kLongestBan = std::chrono::seconds(64);
  static constexpr size_t kMaxBans = 1024;  // that are remembered, of as many holders

  struct Connection {
    int socket = -1;
    const Holder* holder = nullptr;
    State state = State::kBusy;
    TimePoint last_use;  // when it came, or its last call ended
  };

  explicit Door(Shares::Limits limits) : connections_(limits) {}

  static State StateOf(bool has_calls, TimePoint last_use, TimePoint now) {
    return has_calls || now - last_use < kIdleAfter ? State::kBusy : State::kIdle;
  }

  // Counts one more connection. Then, if IsCrowded, one has to make room for it, or it leaves.
  Holder* Enter(const std::string& holder) { return connections_.Take(holder, 1); }
  void Leave(Holder* holder) { connections_.Give(holder, 1); }
  bool IsCrowded() const { return connections_.Debtor() != nullptr; }
  bool IsOverShare(const Holder& holder) const {
    return connections_.IsOverShare(holder.holder, 0);
  }

  // Which of all connections of this door makes room for a new one of `holder`, which is counted
  // already. One of the holder's own if it has more than its share, else one of whoever holds most.
  // Null: none, because none of them is silent or idle, and no other holder has more.
  const Connection* WhoMakesRoom(const std::vector<Connection>& open, const Holder& holder) const;

  // No new connection of the holder is to be let in, twice as long as the last time, unless that
  // ended kLongestBan ago. Nothing changes while it is banned: it may have several connections.
  void Ban(const std::string& holder, TimePoint now);
  bool IsBanned(const std::string& holder, TimePoint now) const;

 private:
  struct BanTime {
    TimePoint end;
    Nanoseconds length;
  };

  Shares connections_;
  std::map<std::string, BanTime> bans_;  // by holder; some have ended
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_SHARING_DOOR_H_
