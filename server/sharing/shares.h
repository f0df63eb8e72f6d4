// Shares of a limited thing, such as memory or connections: how much each client holds, and which
// client has to give back.
#ifndef FLASHCORE_SERVER_SHARING_SHARES_H_
#define FLASHCORE_SERVER_SHARING_SHARES_H_

#include <cstddef>
#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// The rule of every shared thing: a client is refused, or cut off, only for what it holds itself.
// Beyond its share it has to give back. When all clients together take too much, the one that holds
// the most has to, so that there is always room for those that hold little. Not thread-safe.
class Shares {
 public:
  struct Limits {
    size_t all = 0;  // of all clients together; 0: none
    size_t one = 0;  // of one client, its share; 0: none
  };

  struct Item;

  // The holdings of one client. Valid from Take until as much was given back.
  struct Client {
    std::string name;
    size_t held = 0;
    Item* oldest = nullptr;  // of its items
    Item* newest = nullptr;
  };

  // One thing that a client has, for code that must find what the client gives back. Stays in
  // place from Take to Give.
  struct Item {
    Client* client = nullptr;  // null: not taken
    size_t amount = 0;
    Item* older = nullptr;  // of the client
    Item* newer = nullptr;
  };

  explicit Shares(Limits limits) : limits_(limits) {}
  Shares(const Shares&) = delete;
  Shares& operator=(const Shares&) = delete;

  // Takes in any case; then ask MustGiveBack. `amount` > 0.
  Client* Take(absl::string_view name, size_t amount);
  void Give(Client* client, size_t amount);
  // The same of an item.
  void Take(absl::string_view name, size_t amount, Item* item);
  void Give(Item* item);

  // Whether the client, with `amount` more, would hold more than its share.
  bool IsOverShare(absl::string_view name, size_t amount) const;

  // Returns the client that must give back: among clients over their share, the largest; if none is
  // over but the total is exceeded, the largest of all. Null: nobody.
  const Client* MustGiveBack() const;
  // The one that holds the most. Null: nobody holds anything.
  const Client* Largest() const;

  size_t held() const { return held_; }
  size_t items() const { return items_; }
  size_t held(absl::string_view name) const;
  const Limits& limits() const { return limits_; }
  const std::map<std::string, Client, std::less<>>& clients() const { return clients_; }

 private:
  const Limits limits_;
  std::map<std::string, Client, std::less<>> clients_;  // some are idle: clients come back
  size_t held_ = 0;
  size_t items_ = 0;
  size_t over_share_ = 0;  // clients
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_SHARING_SHARES_H_
