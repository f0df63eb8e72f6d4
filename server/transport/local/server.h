// The local socket: accepts connections under limits, and serves them on one thread. Rings have a
// thread of their own (ring_poller.h), and so has work that takes milliseconds.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/transport/local/calls.h"
#include "server/transport/local/connection.h"
#include "server/transport/local/context.h"
#include "server/transport/local/ring_poller.h"

namespace flashcore::server::local {

// A thread that runs jobs in order. Thread-safe.
class JobThread {
 public:
  using Job = absl::AnyInvocable<void()>;

  JobThread() : thread_([this] { Run(); }) {}
  ~JobThread();  // runs what it has
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  void Add(Job job) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class Server {
 public:
  // UNAVAILABLE if it cannot listen. `methods`, and what it uses, outlive this.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options,
                                                       AttentionMethods* methods);
  // Ends all connections, waits for their requests in the engine, and removes the socket's file.
  ~Server();

 private:
  using Posted = std::pair<std::weak_ptr<Connection>, Context::OnConnection>;

  struct Entry {
    std::shared_ptr<Connection> connection;
    std::string user;
    uint32_t events = 0;  // that epoll reports
  };

  Server(const Options& options, AttentionMethods* methods, FileDescriptor listening);
  void Post(std::weak_ptr<Connection> connection, Context::OnConnection action)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Run();
  TimePoint NextCheck() const;  // of times
  void RunPosted() ABSL_LOCKS_EXCLUDED(mutex_);
  void AcceptAll();
  void Admit(FileDescriptor socket);
  // Removes the connection if it has ended, else tells epoll what it waits for.
  void Update(Connection* connection);
  void CheckTimes();
  void Refuse(RefusedLocalConnection reason) {
    context_.metrics().CountRefusedLocalConnection(reason);
  }

  const Options options_;
  Context context_;
  const FileDescriptor listening_;
  const Clock* const clock_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor epoll_;
  const FileDescriptor wake_;  // an eventfd
  std::unique_ptr<UnaryCalls> unary_;

  // Of the thread.
  Acceptor acceptor_;
  std::unordered_map<int, Entry> connections_;  // by socket
  std::unordered_map<std::string, int> per_user_;
  TimePoint next_check_{};

  std::atomic<bool> stop_{false};
  Mutex mutex_;
  std::vector<Posted> posted_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // nothing can be posted any more
  JobThread slow_;
  std::unique_ptr<RingPoller> poller_;
  std::thread thread_;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_SERVER_H_
