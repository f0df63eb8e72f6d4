// The server's end of the local socket and its rings, for the client's tests.
#ifndef FLASHCORE_TESTS_CLIENT_FAKE_LOCAL_SERVER_H_
#define FLASHCORE_TESTS_CLIENT_FAKE_LOCAL_SERVER_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "flashcore/v1/attention.pb.h"
#include "flashcore/v1/local.pb.h"
#include "proto/wire/ring.h"

namespace flashcore {

// Answers Attend as FakeServer does: the output is the query, the LSE counts 0, 1, 2. A thread for
// each connection and ring. Device memory is that of the fake driver in fake_cuda/. Set the public
// members before the first connection.
class FakeLocalServer {
 public:
  FakeLocalServer();
  ~FakeLocalServer();

  std::string target() const { return "local:" + path_; }
  const std::string& path() const { return path_; }

  // Ends all connections and listens no more. Start listens again.
  void Stop();
  void Start();

  // Handles a call: sets the response, or returns why not. Default: UNIMPLEMENTED.
  std::function<v1::Status(const v1::LocalCall&, std::string*)> on_call;
  // Before a request of a ring is answered; its status is the answer's. Default: OK.
  std::function<v1::Status(const v1::AttendRequest&)> on_attend;
  // Replaces the reply to a request, if it returns true.
  std::function<bool(const v1::LocalRequest&, v1::LocalReply*)> on_request;
  // UUID of the GPU with the device memory, 16 bytes. Default: that of the fake driver.
  std::string device_uuid = "fake GPU no. 000";
  // Changes what a completion slot gets.
  std::function<void(wire::CompletionSlot*)> on_completion;

  // While held, rings take requests and do not answer. Cancelled requests are answered at once.
  void Hold(bool held) { held_ = held; }
  int taken() const { return taken_; }  // requests of rings so far
  // Requests in rings that are open, those not taken yet included: a request counts once its call
  // has ended, however late the server's threads are.
  uint64_t submitted() const;
  int connections() const { return accepted_; }  // so far
  int cancelled() const { return cancelled_; }   // Cancels so far
  size_t regions() const ABSL_LOCKS_EXCLUDED(mutex_);
  size_t rings() const;
  // The counter in a region of the only connection, as long as it is held.
  std::shared_ptr<std::atomic<uint64_t>> Counter(const v1::TimelinePoint& point) const;
  uint64_t sleepers() const;  // rings whose client sleeps until an answer, a wake or a deadline

 private:
  struct Connection;
  struct RegionMemory;
  struct RingServer;

  // The sum of `of` over all rings.
  uint64_t Sum(uint64_t (*of)(const wire::RingHeader& ring)) const ABSL_LOCKS_EXCLUDED(mutex_);
  void Accept();
  void Serve(Connection* connection);
  void Handle(Connection* connection, const v1::LocalRequest& request, int fd);
  static int AllocateDeviceMemory(Connection* connection, const std::string& device_uuid,
                                  uint64_t bytes, v1::LocalReply* reply);
  v1::AttendResponse Answer(Connection* connection, const v1::AttendRequest& request);
  void ServeRing(Connection* connection, RingServer* ring);

  std::string folder_, path_;
  int listener_ = -1;
  std::thread acceptor_;
  std::atomic<bool> stopping_{false}, held_{false};
  std::atomic<int> taken_{0}, accepted_{0}, cancelled_{0};
  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_FAKE_LOCAL_SERVER_H_
