// A door of the server: how many connections a client may have there, which one makes room for a
// new one, and which clients are not let in for a while.
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
std::string ConnectionClient(const SocketAddress& peer, std::optional<uid_t> user);

// The doors are TCP, the Unix sockets of gRPC, and the local socket. Each has connections of its
// own, so that nobody at one door can take those of another. Not thread-safe.
class Door {
 public:
  using Client = Shares::Client;

  // In the order in which connections make room.
  enum class State {
    kSilent,  // has not begun to speak the protocol
    kIdle,    // no call is open, and none was for kIdleAfter
    kBusy,
  };
  // A client that makes one call after the other is not idle in between.
  static constexpr Nanoseconds kIdleAfter = std::chrono::seconds(1);

  // How long a client is banned: at first, and at most.
  static constexpr Nanoseconds kFirstBan = std::chrono::seconds(4);
  static constexpr Nanoseconds kLongestBan = std::chrono::seconds(64);
  static constexpr size_t kMaxBans = 1024;  // that are remembered, of as many clients

  struct Connection {
    int socket = -1;
    const Client* client = nullptr;
    State state = State::kBusy;
    TimePoint last_use;  // when it came, or its last call ended
  };

  explicit Door(Shares::Limits limits) : connections_(limits) {}

  static State StateOf(bool has_calls, TimePoint last_use, TimePoint now) {
    return has_calls || now - last_use < kIdleAfter ? State::kBusy : State::kIdle;
  }

  // Counts one more connection. Then, if IsCrowded, one has to make room for it, or it leaves.
  Client* Enter(const std::string& client) { return connections_.Take(client, 1); }
  void Leave(Client* client) { connections_.Give(client, 1); }
  bool IsCrowded() const { return connections_.MustGiveBack() != nullptr; }
  bool IsOverShare(const Client& client) const { return connections_.IsOverShare(client.name, 0); }

  // Which of all connections of this door makes room for a new one of `client`, which is counted
  // already. One of the client's own if it has more than its share, else one of whoever holds most.
  // Null: none, because none of them is silent or idle, and no other client has more.
  const Connection* WhoMakesRoom(const std::vector<Connection>& open, const Client& client) const;

  // No new connection of the client is to be let in, twice as long as the last time, unless that
  // ended kLongestBan ago. Nothing changes while it is banned: it may have several connections.
  void Ban(const std::string& client, TimePoint now);
  bool IsBanned(const std::string& client, TimePoint now) const;

 private:
  struct BanTime {
    TimePoint end;
    Nanoseconds length;
  };

  Shares connections_;
  std::map<std::string, BanTime> bans_;  // by client; some have ended
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_SHARING_DOOR_H_
