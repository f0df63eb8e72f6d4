// The memory for calls over the local socket that are not answered.
#ifndef FLASHCORE_SERVER_SHARING_CALL_ROOM_H_
#define FLASHCORE_SERVER_SHARING_CALL_ROOM_H_

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/sharing/shares.h"

namespace flashcore::server {

// A client beyond its share is refused nothing: its connections are not read until it has room
// again. So it holds its share and one frame more. Thread-safe; outlives its charges.
class CallRoom {
 public:
  // A call's memory, given back at its end.
  class Charge {
   public:
    Charge(CallRoom* room, absl::string_view client, size_t bytes);
    ~Charge();
    Charge(const Charge&) = delete;
    Charge& operator=(const Charge&) = delete;

   private:
    CallRoom* const room_;
    Shares::Client* const client_;
    const size_t bytes_;
  };

  explicit CallRoom(Shares::Limits limits) : shares_(limits) {}
  CallRoom(const CallRoom&) = delete;
  CallRoom& operator=(const CallRoom&) = delete;

  bool HasRoom(absl::string_view client) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs `then` once: when the client has room, now or on the thread that gives it back.
  void WaitForRoom(absl::string_view client, absl::AnyInvocable<void()> then)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Waiting = std::vector<absl::AnyInvocable<void()>>;

  bool Fits(absl::string_view client, size_t most) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Shares::Client* Take(absl::string_view client, size_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Give(Shares::Client* client, size_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  mutable Mutex mutex_;
  Shares shares_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Waiting, std::less<>> waiting_ ABSL_GUARDED_BY(mutex_);  // by client
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_SHARING_CALL_ROOM_H_
