// Things that wait, in an order that is fair among those they are for.
#ifndef FLASHCORE_SERVER_SHARING_TURNS_H_
#define FLASHCORE_SERVER_SHARING_TURNS_H_

#include <algorithm>
#include <cstddef>
#include <deque>
#include <list>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// Clients take turns, one item each, however many one has; its own items keep their order. So a
// client waits for at most one item of each other. Not thread-safe.
template <typename T>
class Turns {
  using Waiting = std::map<std::string, std::list<T>, std::less<>>;

 public:
  // Where an item waits, until it is taken or removed.
  struct Place {
    typename Waiting::iterator client;
    typename std::list<T>::iterator item;
  };

  Place Add(absl::string_view client, T item) {
    auto found = waiting_.find(client);
    if (found == waiting_.end()) {
      found = waiting_.try_emplace(std::string(client)).first;
      order_.push_back(found);
    }
    return {found, found->second.insert(found->second.end(), std::move(item))};
  }

  void Remove(const Place& place) {
    place.client->second.erase(place.item);
    if (!place.client->second.empty()) return;
    order_.erase(std::find(order_.begin(), order_.end(), place.client));
    waiting_.erase(place.client);
  }

  bool empty() const { return order_.empty(); }
  size_t clients() const { return order_.size(); }  // that have an item

  // The oldest item of the client whose turn it is. Not when empty.
  T Take() {
    const auto next = order_.front();
    order_.pop_front();
    T item = std::move(next->second.front());
    next->second.pop_front();
    if (next->second.empty()) {
      waiting_.erase(next);
    } else {
      order_.push_back(next);
    }
    return item;
  }

 private:
  Waiting waiting_;                               // by client; none is empty
  std::deque<typename Waiting::iterator> order_;  // of all clients
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_SHARING_TURNS_H_
