// The local socket: accepts connections under limits, reads and writes them, and runs calls, on one
// thread. Calls that may take milliseconds have a thread of their own, and so have rings
// (ring_poller.h), and work that takes longer. On each of them clients take turns.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/base/use_count.h"
#include "server/sharing/call_room.h"
#include "server/sharing/door.h"
#include "server/sharing/fair_jobs.h"
#include "server/sharing/shares.h"
#include "server/sharing/turns.h"
#include "server/transport/local/calls.h"
#include "server/transport/local/connection.h"
#include "server/transport/local/ring_poller.h"

namespace flashcore::server::local {

class Server {
 public:
  struct Options {
    std::string path;  // of the socket; empty: there is none
    UnixSocketAccess access;
    Shares::Limits connections{/*all=*/1024, /*one=*/256};
    Connection::Options connection;
    Shares::Limits received_bytes;  // of frames that have not completely arrived
    Shares::Limits call_bytes;      // of unanswered calls
    // The socket will never accept again. On the thread of the connections.
    std::function<void(const std::string& address)> on_dead;
  };

  // UNAVAILABLE if it cannot listen. `methods`, and what it uses, and `passed_files` outlive this.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options,
                                                       AttentionMethods* methods,
                                                       PassedFiles* passed_files);
  // Ends all connections, waits for their requests in the engine, and removes the socket's file.
  ~Server();

 private:
  using Posted = std::pair<std::weak_ptr<Connection>, Connection::Action>;

  struct Entry {
    std::shared_ptr<Connection> connection;
    Door::Client* client = nullptr;
    uint32_t events = 0;  // that epoll reports; none while the connection waits for its turn
    uint32_t came = 0;    // that it has reported
    std::optional<Turns<Entry*>::Place> turn;
    bool has_deadline = true;
    Shares::Item received;  // its memory of frames
  };

  Server(const Options& options, AttentionMethods* methods, PassedFiles* passed_files,
         FileDescriptor listening);
  void Post(absl::string_view client, std::weak_ptr<Connection> connection,
            Connection::Action action) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run();
  // False: it has one already.
  bool GiveTurn(Entry* entry);
  void RunTurns();  // one of each client
  // When CheckTimes is due.
  TimePoint NextCheck() const { return with_deadline_ > 0 ? next_check_ : kNoDeadline; }
  void RunPosted() ABSL_LOCKS_EXCLUDED(mutex_);
  void AcceptAll();
  void Admit(FileDescriptor socket);
  // False if there is none for a new connection of `client`, which is counted already.
  bool MakeRoom(const Door::Client& client);
  // Whether the connection is not read yet, because its client is banned.
  bool MustWait(const Entry& entry) const;
  void Want(Entry* entry, uint32_t events);
  // Removes the connection if it has ended, else tells epoll what it waits for.
  void Update(Connection* connection);
  // Charges the connection's memory of messages to its client: before Hello, that at the door.
  void Charge(Entry* entry);
  void EndToFreeMemory();
  void CheckTimes();
  void Refuse(RefusedLocalConnection reason) { metrics_.CountRefusedLocalConnection(reason); }

  UseCount uses_;
  Connection::Services services_;
  const Options options_;
  FileDescriptor listening_;
  Metrics& metrics_;
  const Clock* const clock_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor epoll_;
  const FileDescriptor wake_;  // an eventfd
  const MethodTable method_table_;

  // Used by the thread.
  Acceptor acceptor_;
  std::unordered_map<int, Entry> connections_;  // by socket
  Door door_;
  Shares received_;      // bytes of frames
  Turns<Entry*> turns_;  // by client
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
  InputWaits& input_waits_;
  std::unique_ptr<RingPoller> poller_;
  std::thread thread_;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_
