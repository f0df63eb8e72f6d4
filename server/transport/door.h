// Who may have how many connections at a door of the server, and whose makes room for a new one.
#ifndef FLASHCORE_SERVER_TRANSPORT_DOOR_H_
#define FLASHCORE_SERVER_TRANSPORT_DOOR_H_

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/shares.h"
#include "server/base/socket.h"

namespace flashcore::server {

// Whom a connection counts for: the user of this host at its other end, if the kernel tells; else
// everything over loopback together; else the IPv4 address or the IPv6 /64 network.
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

 private:
  Shares connections_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_DOOR_H_
