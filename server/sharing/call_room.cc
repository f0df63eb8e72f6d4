#include "server/sharing/call_room.h"

#include <iterator>

namespace flashcore::server {

CallRoom::Charge::Charge(CallRoom* room, absl::string_view client, size_t bytes)
    : room_(room), client_(room->Take(client, bytes)), bytes_(bytes) {}

CallRoom::Charge::~Charge() { room_->Give(client_, bytes_); }

bool CallRoom::Fits(absl::string_view client, size_t most) const {
  if (most > 0 && shares_.held(client) > most) return false;
  const Shares::Limits& limits = shares_.limits();
  if (limits.all == 0 || shares_.held() <= limits.all) return true;
  return shares_.MustGiveBack()->name != client;
}

bool CallRoom::HasRoom(absl::string_view client) const {
  MutexLock lock(&mutex_);
  return Fits(client, shares_.limits().one);
}

void CallRoom::WaitForRoom(absl::string_view client, absl::AnyInvocable<void()> then) {
  {
    MutexLock lock(&mutex_);
    if (!Fits(client, shares_.limits().one)) {
      waiting_[std::string(client)].push_back(std::move(then));
      return;
    }
  }
  then();
}

Shares::Client* CallRoom::Take(absl::string_view client, size_t bytes) {
  MutexLock lock(&mutex_);
  return shares_.Take(client, bytes);
}

void CallRoom::Give(Shares::Client* client, size_t bytes) {
  Waiting can_go_on;
  {
    MutexLock lock(&mutex_);
    shares_.Give(client, bytes);
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      // Half of it, so that connections do not stop and go on with each call.
      if (!Fits(it->first, shares_.limits().one / 2)) {
        ++it;
        continue;
      }
      std::move(it->second.begin(), it->second.end(), std::back_inserter(can_go_on));
      it = waiting_.erase(it);
    }
  }
  for (auto& then : can_go_on) then();
}

}  // namespace flashcore::server
