// The local socket: accepts connections under limits, reads and writes them, and runs calls, on one
// thread. Calls that may take milliseconds have a thread of their own, and so have rings
// (ring_poller.h), and work that takes longer. On each of them clients take turns.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/sharing/call_room.h"
#include "server/sharing/door.h"
#include "server/sharing/fair_jobs.h"
#include "server/sharing/shares.h"
#include "server/sharing/turns.h"
#include "server/transport/local/calls.h"
#include "server/transport/local/connection.h"
#include "server/transport/local/context.h"
#include "server/transport/local/ring_poller.h"

namespace flashcore::server::local {

class Server {
 public:
  // UNAVAILABLE if it cannot listen. `methods`, and what it uses, and `passed_files` outlive this.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options,
                                                       AttentionMethods* methods,
                                                       PassedFiles* passed_files);
  // Ends all connections, waits for their requests in the engine, and removes the socket's file.
  ~Server();

 private:
  using Posted = std::pair<std::weak_ptr<Connection>, Context::OnConnection>;

  struct Entry {
    std::shared_ptr<Connection> connection;
    Door::Holder* holder = nullptr;
    uint32_t events = 0;  // that epoll reports; none while the connection waits for its turn
    uint32_t came = 0;    // that it has reported
    std::optional<Turns<Entry*>::Place> turn;
    bool has_deadline = true;
    Shares::Item received;  // its memory of frames
  };

  Server(const Options& options, AttentionMethods* methods, PassedFiles* passed_files,
         FileDescriptor listening);
  void Post(absl::string_view client, std::weak_ptr<Connection> connection,
            Context::OnConnection action) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run();
  // False: it has one already.
  bool GiveTurn(Entry* entry);
  void RunTurns();  // one of each user
  // When CheckTimes is due.
  TimePoint NextCheck() const { return with_deadline_ > 0 ? next_check_ : kNoDeadline; }
  void RunPosted() ABSL_LOCKS_EXCLUDED(mutex_);
  void AcceptAll();
  void Admit(FileDescriptor socket);
  // False if there is none for a new connection of `holder`, which is counted already.
  bool MakeRoom(const Door::Holder& holder);
  // Whether the connection is not read yet, because its user is banned.
  bool MustWait(const Entry& entry) const;
  void Want(Entry* entry, uint32_t events);
  // Removes the connection if it has ended, else tells epoll what it waits for.
  void Update(Connection* connection);
  // Charges the connection's memory of messages to its client, or its user before Hello.
  void Charge(Entry* entry);
  void EndDebtors();
  void CheckTimes();
  void Refuse(RefusedLocalConnection reason) {
    context_.metrics().CountRefusedLocalConnection(reason);
  }

  Context context_;
  const Options options_;
  FileDescriptor listening_;
  const Clock* const clock_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor epoll_;
  const FileDescriptor wake_;  // an eventfd
  std::unique_ptr<MethodTable> method_table_;

  // Of the thread.
  Acceptor acceptor_;
  std::unordered_map<int, Entry> connections_;  // by socket
  Door door_;
  Shares received_;      // bytes of frames
  Turns<Entry*> turns_;  // by user
  TimePoint next_check_{};
  size_t with_deadline_ = 0;  // connections

  std::atomic<bool> stop_{false};
  Mutex mutex_;
  Turns<Posted> posted_ ABSL_GUARDED_BY(mutex_);  // by client
  bool awake_ ABSL_GUARDED_BY(mutex_) = false;    // the thread will look at posted_
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;   // nothing can be posted any more
  CallRoom room_;
  FairJobs slow_;
  FairJobs long_calls_;
  std::unique_ptr<RingPoller> poller_;
  std::thread thread_;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_
