// Shares of a limited thing, such as memory or connections: who holds how much, and who has to give
// back.
#ifndef FLASHCORE_SERVER_BASE_SHARES_H_
#define FLASHCORE_SERVER_BASE_SHARES_H_

#include <cstddef>
#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// The rule of every shared thing: a holder is refused, or cut off, only for what it holds itself.
// Beyond its share it has to give back. When all holders together take too much, the one that holds
// the most has to, so that there is always room for those that hold little. Not thread-safe.
class Shares {
 public:
  struct Limits {
    size_t all = 0;  // of all holders together; 0: none
    size_t one = 0;  // of one holder, its share; 0: none
  };

  struct Item;

  // The holdings of one holder. Valid from Take until as much was given back.
  struct Account {
    std::string holder;
    size_t held = 0;
    Item* oldest = nullptr;  // of its items
    Item* newest = nullptr;
  };

  // One thing that a holder has, for an owner that must find what a debtor gives back. Stays in
  // place from Take to Give.
  struct Item {
    Account* account = nullptr;  // null: not taken
    size_t amount = 0;
    Item* older = nullptr;  // of the account
    Item* newer = nullptr;
  };

  explicit Shares(Limits limits) : limits_(limits) {}
  Shares(const Shares&) = delete;
  Shares& operator=(const Shares&) = delete;

  // Takes in any case; then ask Debtor. `amount` > 0.
  Account* Take(absl::string_view holder, size_t amount);
  void Give(Account* account, size_t amount);
  // The same of an item.
  void Take(absl::string_view holder, size_t amount, Item* item);
  void Give(Item* item);

  // Whether the holder, with `amount` more, would hold more than its share.
  bool IsOverShare(absl::string_view holder, size_t amount) const;

  // Returns the holder that must give back: among holders over their share, the largest; if none is
  // over but the total is exceeded, the largest of all. Null: nobody.
  const Account* Debtor() const;
  // The one that holds the most. Null: nobody holds anything.
  const Account* Largest() const;

  size_t held() const { return held_; }
  size_t held(absl::string_view holder) const;
  const Limits& limits() const { return limits_; }
  const std::map<std::string, Account, std::less<>>& accounts() const { return accounts_; }

 private:
  const Limits limits_;
  std::map<std::string, Account, std::less<>> accounts_;  // some are idle: holders come back
  size_t held_ = 0;
  size_t over_share_ = 0;  // accounts
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_SHARES_H_
