// The thread that takes the requests of all rings.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_POLLER_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_POLLER_H_

#include <atomic>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/engine/input_waits.h"
#include "server/sharing/turns.h"
#include "server/transport/local/ring_session.h"
#include "server/transport/local/ring_turns.h"

namespace flashcore::server::local {

// After the last request it looks at the rings for a while, and then sleeps until a doorbell rings.
// Doorbells are eventfds that are never read: epoll reports each write to them, and no client can
// make the thread wait. Thread-safe.
class RingPoller {
 public:
  // `spin`: how long it looks at rings and `waits` before it sleeps. 0: not at all. While there are
  // waits it sleeps in short naps.
  RingPoller(Nanoseconds spin, InputWaits* waits, const Clock* clock);
  ~RingPoller();
  RingPoller(const RingPoller&) = delete;
  RingPoller& operator=(const RingPoller&) = delete;

  void Add(std::shared_ptr<RingSession> session) ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets go of the session, soon.
  void Remove(const std::shared_ptr<RingSession>& session) ABSL_LOCKS_EXCLUDED(mutex_);

  // False: too many files. The client has the same file description: epoll would report it also
  // after the server's descriptor is closed, so remove it before.
  bool AddDoorbell(int eventfd);
  void RemoveDoorbell(int eventfd);

  void Wake();  // for a wait that has come

 private:
  struct Command {
    std::shared_ptr<RingSession> session;
    bool add = false;  // else: remove
  };

  void Post(Command command) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run();
  void RunCommands() ABSL_LOCKS_EXCLUDED(mutex_);
  bool Sleep();  // false: it was a nap, and nothing came

  const Nanoseconds spin_;
  InputWaits* const waits_;
  const Clock* const clock_;
  const FileDescriptor epoll_;
  const FileDescriptor wake_;  // an eventfd
  RingTurns turns_;            // of the thread
  std::atomic<bool> has_commands_{false};
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  Turns<Command> commands_ ABSL_GUARDED_BY(mutex_);  // by client
  std::thread thread_;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_POLLER_H_
